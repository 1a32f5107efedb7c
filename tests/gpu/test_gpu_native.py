"""The CUDA part of csrc on a real GPU: needs a build with BANASERVE_CUDA=1, torch, and no vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

native = pytest.importorskip("banaserve._native_cuda", reason="built without BANASERVE_CUDA=1")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

COPIES = [native.copy_batch, native.copy_by_kernel]


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("num_bytes", [1, 3, 4, 16, 4096, 32 << 10, (1 << 20) + 4])
@pytest.mark.parametrize("count", [1, 3, 251])
def test_scattered_copies_between_host_and_device(copy, num_bytes, count, stream):
    stride = -(-num_bytes // 16) * 16 + 16
    draws = torch.Generator().manual_seed(num_bytes)
    host = torch.randint(0, 256, (count * stride,), dtype=torch.uint8, generator=draws)
    host = host.pin_memory()
    device = torch.zeros(count * stride, dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(host).pin_memory()
    order = torch.randperm(count, generator=draws).numpy() * stride
    plain = np.arange(count) * stride
    torch.cuda.synchronize()
    copy(device.data_ptr() + order, host.data_ptr() + plain, num_bytes, stream.cuda_stream)
    copy(back.data_ptr() + plain, device.data_ptr() + order, num_bytes, stream.cuda_stream)
    stream.synchronize()
    expected = host.view(count, stride).clone()
    expected[:, num_bytes:] = 0
    assert torch.equal(back.view(count, stride), expected)
    assert not device.view(count, stride)[:, num_bytes:].any()


@pytest.mark.parametrize("copy", COPIES)
def test_refusals_name_the_argument(copy, stream):
    one, two = np.ones(1, np.int64), np.ones(2, np.int64)
    handle = stream.cuda_stream
    copy(one[:0], one[:0], 8, handle)
    for arguments, named in [
        ((one, two, 8, handle), "src"),
        ((one * 0, one, 8, handle), "dst"),
        ((one, one * 0, 8, handle), "src"),
        ((one, one, -1, handle), "num_bytes"),
        ((one, one, 8, 0), "stream"),
    ]:
        with pytest.raises(ValueError, match=named):
            copy(*arguments)


def test_a_slab_backs_and_gives_up_granules():
    slab = native.GpuSlab(5 << 20, 0)
    granule = slab.granule_bytes
    assert slab.num_bytes >= 5 << 20
    assert slab.mapped_bytes == 0
    assert slab.map(granule - 1, 2) == [0, granule]
    assert slab.map(0, granule) == []
    assert slab.mapped_bytes == 2 * granule
    assert slab.unmap(1, granule) == 0
    assert slab.unmap(0, 2 * granule - 1) == granule
    assert slab.mapped_bytes == granule
    for offset, num_bytes in [(-1, 1), (0, slab.num_bytes + 1), (slab.num_bytes, 1)]:
        with pytest.raises(ValueError, match="within the slab"):
            slab.map(offset, num_bytes)


@pytest.mark.parametrize(
    ("copy", "place"),
    [
        *[(copy, place) for copy in COPIES for place in ("gpu", "pinned")],
        (native.copy_batch, "pageable"),  # as where a pool cannot be pinned
    ],
)
def test_a_copy_over_several_granules_holds_what_is_written(copy, place):
    slab = native.GpuSlab(1 << 22, 0)
    slab.map(0, 1 << 22)
    values = torch.arange(1 << 20, dtype=torch.int32)
    values = values.cuda() if place == "gpu" else values
    back, stream = torch.zeros_like(values), torch.cuda.Stream()
    if place == "pinned":
        values, back = values.pin_memory(), back.pin_memory()
    torch.cuda.synchronize()
    address = np.array([slab.address], np.int64)
    copy(address, np.array([values.data_ptr()]), 1 << 22, stream.cuda_stream)
    copy(np.array([back.data_ptr()]), address, 1 << 22, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(back.cpu(), values.cpu())
