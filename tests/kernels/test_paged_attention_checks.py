"""What attends where, what the kernels' attention refuses, and a layer whose heads are apart."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from banaserve.base.errors import GuestLostError, MigrationError, UserError
from banaserve.engine.compat.runner.hooks import window_tokens
from banaserve.engine.connector import block_hash
from banaserve.engine.migration_settings import KEY, settings_of
from banaserve.kernels.layouts import key_value_views
from banaserve.kernels.reference import ReferenceKernels
from banaserve.kernels.registry import Picked
from banaserve.migration import checks
from banaserve.migration.modules import attention_backend, partial_model
from banaserve.migration.modules.attention_backend import attention_blocker, kernels_for
from banaserve.migration.modules.head_attention import KernelsHeadAttention
from banaserve.migration.modules.head_split import SplitHeads
from banaserve.migration.modules.paged_attention import (
    KernelsAttention,
    StepBatches,
    check_plain,
    kernels_of,
    take_kernels,
    write_tokens,
)
from banaserve.migration.rpc.messages import AttentionSlice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BLOCKS, SIZE, KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 3, 2, 64
KERNELS = ReferenceKernels(torch.float32)


# ---- which


@pytest.mark.parametrize("choice", ["auto", "vllm"])
def test_on_a_cpu_vllms_own_attends_where_nothing_is_asked_for(choice: str) -> None:
    assert kernels_for(choice, CPU) is None


@pytest.mark.parametrize("choice", ["kernels", "reference"])
def test_on_a_cpu_the_reference_is_what_there_is(choice: str) -> None:
    found = kernels_for(choice, CPU)
    assert found is not None
    assert found.name == "reference"


@pytest.mark.parametrize(
    ("choice", "asked"),
    [("auto", "auto"), ("kernels", "auto"), ("triton", "triton"), ("flashinfer", "flashinfer")],
)
def test_on_a_gpu_the_registry_is_asked(
    choice: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(device: torch.device, choice: str) -> Picked:
        assert (device, choice) == (CUDA, asked)
        return Picked(KERNELS, "")

    monkeypatch.setattr(attention_backend.registry, "pick", pick)
    assert kernels_for(choice, CUDA) is KERNELS


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(MigrationError, match="cannot be split on cuda: leave"):
        kernels_for("vllm", CUDA)
    with pytest.raises(MigrationError, match="triton does not run on cpu"):
        kernels_for("triton", CPU)
    config: Any = SimpleNamespace(additional_config={KEY: {"attention": "kernel"}})
    with pytest.raises(UserError, match="did you mean kernels"):
        settings_of(config)


def test_kernels_that_the_user_names_are_looked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert attention_blocker("triton", "cpu") == (
        "--migration-attention triton: triton does not run on cpu; choose auto"
    )
    for name in ("auto", "vllm", "kernels", "reference"):
        assert attention_blocker(name, "cpu") == ""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "flashinfer" else found(name)
    )
    assert "flashinfer is not installed; choose auto" in attention_blocker("flashinfer", "cuda")


def test_a_guest_computes_where_its_engine_does() -> None:
    for kind, rank, device in (
        ("cpu", 0, CPU),
        ("cpu", 1, CPU),
        ("cuda", 0, CUDA),
        ("cuda", 1, torch.device("cuda", 1)),
    ):
        config: Any = SimpleNamespace(
            device_config=SimpleNamespace(device_type=kind),
            parallel_config=SimpleNamespace(rank=rank),
        )
        assert partial_model.device_of(config) == device


@pytest.mark.parametrize("choice", ["kernels", "reference"])
def test_blocks_that_kernels_have_written_are_no_blocks_of_vllms(choice: str) -> None:
    spec: Any = SimpleNamespace(dtype=torch.float32, block_size=32, head_size=HEAD_SIZE)
    of = {
        name: block_hash._instruction_set(config_with(name), spec)
        for name in (choice, "auto", "vllm")
    }
    assert of[choice] == "plain"
    assert of["auto"] == of["vllm"] != "plain"


def config_with(attention: str) -> Any:
    return SimpleNamespace(additional_config={KEY: {"attention": attention}})


# ---- refusals


def layer(**more: Any) -> Any:
    """An attention as vLLM builds it."""
    backend = SimpleNamespace(forward_includes_kv_cache_update=False, get_name=lambda: "B")
    impl = SimpleNamespace(
        sliding_window=-1, logits_soft_cap=0, alibi_slopes=None, sinks=None, scale=HEAD_SIZE**-0.5
    )
    fields = {
        "impl": impl, "kv_cache_dtype": "auto", "head_size": HEAD_SIZE, "head_size_v": HEAD_SIZE,
        "attn_backend": backend, "num_heads": KV_HEADS * GROUP, "num_kv_heads": KV_HEADS,
        "kv_cache": torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * HEAD_SIZE),
    }  # fmt: skip
    for name, value in more.items():
        if name in fields:
            fields[name] = value
        elif name == "writes":
            backend.forward_includes_kv_cache_update = value
        else:
            setattr(impl, name, value)
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"sliding_window": 4096}, "sliding window"),
        ({"sliding_window": (4095, 0)}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "cap of the scores"),
        ({"alibi_slopes": torch.ones(3)}, "ALiBi"),
        ({"sinks": torch.ones(3)}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "KV as fp8.*--kv-cache-dtype"),
        ({"head_size": 72}, "heads of size 72.*reference kernels.*64, 80"),
        ({"kv_cache": torch.zeros(1, dtype=torch.float64)}, "in float64.*float16, bfloat16"),
        ({"head_size_v": 128}, "heads of size 64"),
        ({"writes": True}, r"while it attends \(B\).*--attention-backend"),
    ],
)
def test_attention_that_kernels_would_compute_otherwise_is_refused(odd: Any, why: str) -> None:
    attentions = {"a": layer(), "b": layer(**odd)}
    before = attentions["a"].impl
    with pytest.raises(MigrationError, match=why):
        take_kernels(KERNELS, attentions, ["a", "b"])
    assert attentions["a"].impl is before, "nothing has changed"


@pytest.mark.parametrize("window", [None, -1, 0, (-1, -1), (-1, 0)])
def test_what_vllm_writes_for_no_window_is_none(window: Any) -> None:
    check_plain(layer(sliding_window=window, logits_soft_cap=None), "a", KERNELS)
    assert window_tokens(SimpleNamespace(sliding_window=window)) is None


@pytest.mark.parametrize("window", [4096, (4095, 0), (4095, 4095)])
def test_a_window_counts_its_own_token_in_either_form(window: Any) -> None:
    assert window_tokens(SimpleNamespace(sliding_window=window)) == 4096


OUR_KERNELS = {"banaserve_migration": {"attention": "kernels"}}


@pytest.mark.parametrize(
    ("kind", "graphs", "second", "use_mla", "attends", "why"),
    [
        ("cuda", "FULL", False, False, {}, "CUDA graphs.*--enforce-eager"),
        ("cuda", "PIECEWISE", False, False, {}, "CUDA graphs"),
        ("cuda", "breakable PIECEWISE", False, False, {}, ""),
        (
            "cuda",
            "breakable FULL_AND_PIECEWISE",
            False,
            False,
            {},
            "FULL_AND_PIECEWISE CUDA graphs",
        ),
        ("cuda", "NONE", True, False, {}, ""),
        ("xpu", "NONE", False, False, {}, "lies on xpu"),
        ("cuda", "NONE", False, False, {}, ""),
        ("cpu", "NONE", True, False, {}, ""),
        ("cuda", "NONE", False, True, {}, "MLA's latents"),
        ("cpu", "NONE", True, True, OUR_KERNELS, "MLA's latents"),
        ("cpu", "NONE", True, True, {}, ""),
        ("cpu", "NONE", True, False, OUR_KERNELS, ""),
    ],
)
def test_what_cannot_be_on_a_gpu_or_with_our_kernels_is_said(
    kind: str,
    graphs: str,
    second: bool,
    use_mla: bool,
    attends: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import envs
    from vllm.config import CompilationMode, CUDAGraphMode

    envs.disable_envs_cache()  # an engine that another test ran in this process has kept them
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int("breakable" in graphs)))

    parallel = SimpleNamespace(
        tensor_parallel_size=1 + (kind == "cuda"), pipeline_parallel_size=1, data_parallel_size=1
    )
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=kind),
        compilation_config=SimpleNamespace(
            mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode[graphs.split()[-1]]
        ),
        use_v2_model_runner=second,
        model_config=SimpleNamespace(
            use_mla=use_mla,
            quantization=None,
            is_hybrid=False,
            is_attention_free=False,
            has_inner_state=False,
        ),
        additional_config=attends,
        speculative_config=None,
        parallel_config=parallel,
        lora_config=None,
        load_config=SimpleNamespace(load_format="auto"),
    )
    if not why:
        checks.check_config(config)
        return
    with pytest.raises(MigrationError, match=why):
        checks.check_config(config)


def test_kv_that_cannot_get_slabs_is_refused() -> None:
    def caches(*kinds: str, dim: int = 4) -> dict[str, torch.Tensor]:
        shape = (5, 2, 4, 8)[:dim]
        return {str(i): torch.zeros(shape, device=kind) for i, kind in enumerate(kinds)}

    checks.check_tensors(caches("cpu", "cpu"), "LBHNC", 5)
    checks.check_tensors({"a": torch.zeros(5, 1, 4, 8)}, "LBNHC", 5)
    one = torch.zeros(5, 2, 4, 8)
    for given, layout, why in (
        (caches("cpu"), "LBNHC", "laid out as LBNHC.*VLLM_KV_CACHE_LAYOUT=LBHNC"),
        ({"a": torch.zeros(5, 1, 4, 8)}, "BLHNC", "laid out as BLHNC"),
        (caches("cpu", dim=3), "LBHNC", "other dimensions"),
        (caches("cpu", "meta"), "LBHNC", "several devices"),
        ({"a": one, "b": one}, "LBHNC", "share one"),
        ({"a": one, "b": one.half()}, "LBHNC", "differs in shape"),
    ):
        with pytest.raises(MigrationError, match=why):
            checks.check_tensors(given, layout, 5)
    with pytest.raises(MigrationError, match="--block-size 2 times smaller"):
        checks.check_tensors({"a": torch.zeros(10, 2, 4, 8)}, "LBHNC", 5)


# ---- attention


class Step:
    """Two sequences: one of 9 tokens that asks with its last three, and a fresh one of 5.

    Attributes:
        metadata: As vLLM's attention on a CPU takes it.
        common: What that is made of, as a watch of steps has it.
        key: Of all their tokens so far, one sequence behind the other; likewise ``value``.
    """

    def __init__(self, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.metadata = SimpleNamespace(
            causal=True,
            num_actual_tokens=8,
            max_seq_len=9,
            query_start_loc=torch.tensor([0, 3, 8], dtype=torch.int32),
            seq_lens=torch.tensor([9, 5], dtype=torch.int32),
            block_table=torch.tensor([[6, 2, 7], [1, 4, 0]], dtype=torch.int32),
        )
        self.slots = torch.tensor([24, 25, 26, 27, 8, 9, 10, 11, 28, 4, 5, 6, 7, 16])
        self.new = torch.tensor([6, 7, 8, 9, 10, 11, 12, 13])
        fields = {**vars(self.metadata), "num_reqs": 2}
        fields["block_table_tensor"] = fields.pop("block_table")
        self.common = SimpleNamespace(**fields)
        shape = len(self.slots), KV_HEADS, HEAD_SIZE
        self.key, self.value = (torch.randn(shape, generator=draws) for _ in range(2))
        self.query = torch.randn(8, KV_HEADS * GROUP, HEAD_SIZE, generator=draws)

    def expected(self) -> torch.Tensor:
        """By torch's own attention, sequence by sequence."""
        outputs = []
        for rows, tokens in ((slice(0, 3), slice(0, 9)), (slice(3, 8), slice(9, 14))):
            query, key, value = self.query[rows], self.key[tokens], self.value[tokens]
            count, total = len(query), len(key)
            seen = torch.ones(count, total, dtype=torch.bool).tril(total - count)
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query.transpose(0, 1), *(
                        tensor.repeat_interleave(GROUP, 1).transpose(0, 1)
                        for tensor in (key, value)
                    ), attn_mask=seen,
                ).transpose(0, 1)
            )  # fmt: skip
        return torch.cat(outputs)

    def write_old(self, cache: torch.Tensor, heads: list[int] | None = None) -> None:
        old = torch.tensor([i for i in range(len(self.slots)) if i not in self.new.tolist()])
        chosen = slice(None) if heads is None else heads
        write_tokens(cache, self.key[old][:, chosen], self.value[old][:, chosen], self.slots[old])


def step_of(attention: Any, step: Step) -> torch.Tensor:
    """What vLLM's module does: write, then attend; two rows of padding behind."""
    padding = torch.full((2, KV_HEADS, HEAD_SIZE), 7.0)
    key, value = (torch.cat([t[step.new], padding]) for t in (step.key, step.value))
    query = torch.cat([step.query, torch.full((2, KV_HEADS * GROUP, HEAD_SIZE), 7.0)])
    cache = attention.kv_cache
    attention.impl.do_kv_cache_update(attention, key, value, cache, step.slots[step.new])
    output = torch.full_like(query, 5.0)
    attention.impl.forward(attention, query, key, value, cache, step.metadata, output=output)
    assert (output[8:] == 5.0).all(), "padding is left alone"
    return output[:8]


def test_a_whole_layer_attends_as_torch_does() -> None:
    step, attention = Step(), layer()
    take_kernels(KERNELS, {"a": attention}, ["a"])
    attention.kv_cache.fill_(float("nan"))
    step.write_old(attention.kv_cache)
    assert torch.allclose(step_of(attention, step), step.expected(), atol=2e-6)
    key, value = key_value_views(attention.kv_cache)
    assert torch.equal(key[step.slots // SIZE, step.slots % SIZE], step.key)
    assert torch.equal(value[step.slots // SIZE, step.slots % SIZE], step.value)
    assert kernels_of(attention.impl) is KERNELS


def test_no_kernels_change_nothing() -> None:
    attention = layer()
    before = attention.impl
    take_kernels(None, {"a": attention}, ["a"])
    assert attention.impl is before
    assert kernels_of(before) is None


def test_tokens_without_a_slot_end_in_the_block_for_nothing() -> None:
    cache = torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * HEAD_SIZE)
    new = torch.ones(3, KV_HEADS, HEAD_SIZE)
    write_tokens(cache, new, new, torch.tensor([9, -1]), [0, 2])
    written = cache.abs().sum((1, 3)).nonzero().tolist()
    assert written == [[0, 0], [2, 1]]
    assert not cache[:, 1].any(), "the heads that were not named"


def test_what_is_made_of_a_step_is_kept_for_all_layers() -> None:
    step, batches = Step(), StepBatches()
    first = batches.of(step.metadata)
    assert batches.of(step.metadata) is first
    assert first.query_position.tolist() == [6, 0]
    other = SimpleNamespace(**vars(step.metadata))
    assert batches.of(other) is not first
    other = SimpleNamespace(**{**vars(step.metadata), "causal": False})
    with pytest.raises(ValueError, match="causal"):
        batches.of(other)


class Guest:
    """Some heads of the layer as a guest has them, asked at once."""

    link = None

    def __init__(self, step: Step, heads: list[int], lost: bool = False) -> None:
        self.link = object()
        cache = torch.full((BLOCKS, len(heads), SIZE, 2 * HEAD_SIZE), float("nan"))
        step.write_old(cache, heads)
        part = AttentionSlice(
            "l", len(heads) * GROUP, len(heads), HEAD_SIZE, HEAD_SIZE**-0.5, None, None
        )
        self._attention = KernelsHeadAttention(part, cache, KERNELS)
        self._step = step
        self._lost = lost
        self._output = torch.empty(0)

    def submit(self, _: str, *parts: torch.Tensor) -> None:
        metadata = self._attention.metadata(self._step.common)  # type: ignore[arg-type]
        self._output = self._attention.run(metadata, self._step.slots[self._step.new], *parts)

    def collect(self, _: torch.Tensor) -> list[torch.Tensor]:
        if self._lost:
            raise GuestLostError("gone")
        return [self._output]


@pytest.mark.parametrize("groups", [[[1]], [[0, 2]], [[2], [0]], [[0, 1, 2]], [[1, 2], [0]]])
def test_heads_apart_are_the_whole_layer(groups: list[list[int]]) -> None:
    step, attention = Step(), layer()
    take_kernels(KERNELS, {"a": attention}, ["a"])
    whole = attention.impl
    assert isinstance(whole, KernelsAttention)
    here = [head for head in range(KV_HEADS) if not any(head in group for group in groups)]
    attention.kv_cache.fill_(float("nan"))
    old = torch.full_like(attention.kv_cache, float("nan"))
    step.write_old(old)
    attention.kv_cache[:, here] = old[:, here]
    lost: list[Any] = []
    split = SplitHeads(None, attention, "l", step, lambda *e: lost.append(e))  # type: ignore[arg-type]
    for group in groups:
        split.arrange(str(group), group, Guest(step, group))  # type: ignore[arg-type]
    assert torch.allclose(step_of(attention, step), step.expected(), atol=2e-6)
    away = [head for group in groups for head in group]
    assert attention.kv_cache[:, away].isnan().all(), "their keys and values left"
    assert kernels_of(attention.impl) is KERNELS
    for group in groups:
        split.arrange(str(group), group, None)
    assert attention.impl is whole
    assert lost == []


def test_heads_whose_guest_is_lost_are_zero() -> None:
    step, attention = Step(), layer()
    take_kernels(KERNELS, {"a": attention}, ["a"])
    step.write_old(attention.kv_cache)
    lost: list[Any] = []
    split = SplitHeads(None, attention, "l", step, lambda *e: lost.append(e))  # type: ignore[arg-type]
    split.arrange("u", [1], Guest(step, [1], lost=True))  # type: ignore[arg-type]
    output = step_of(attention, step)
    assert len(lost) == 1
    assert not output[:, 2:4].any()
    assert torch.allclose(output[:, [0, 1, 4, 5]], step.expected()[:, [0, 1, 4, 5]], atol=2e-6)


def write(key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
    """As vLLM's own attention."""
    write_tokens(kv_cache, key, value, slots)


def test_where_vllms_own_reads_the_same_kv_only_splits_take_the_kernels() -> None:
    step, attention = Step(), layer()
    calls: list[str] = []
    inner = attention.impl
    inner.do_kv_cache_update = lambda _, *new: (calls.append("write"), write(*new))
    inner.forward = lambda *_, output: calls.append("attend") or output
    KernelsAttention(attention, "a", KERNELS, StepBatches(), splits_only=True)
    step_of(attention, step)
    assert calls == ["write", "attend"]
    calls.clear()
    attention.kv_cache.fill_(float("nan"))
    step.write_old(attention.kv_cache)
    split = SplitHeads(None, attention, "l", step, lambda *_: None)  # type: ignore[arg-type]
    split.arrange("u", [1], Guest(step, [1]))  # type: ignore[arg-type]
    assert torch.allclose(step_of(attention, step), step.expected(), atol=2e-6)
    assert calls == ["write"], "of all heads, as a CUDA graph writes them, which is kept"


def test_a_layer_that_is_let_go_frees_its_kv_at_once() -> None:
    attention = layer()
    KernelsAttention(attention, "a", KERNELS, StepBatches())
    kv_cache = weakref.ref(attention.kv_cache)
    gc.disable()
    try:
        del attention
        assert kv_cache() is None, "kept by a reference cycle"
    finally:
        gc.enable()
