import numpy as np
import numpy.typing as npt

def copy_batch(
    dst: npt.NDArray[np.int64], src: npt.NDArray[np.int64], num_bytes: int, stream: int
) -> None:
    """Queue copies of ``num_bytes`` on the copy engines, in one call, in any order.

    Args:
        dst: ``[num_copies]`` addresses in device memory or pinned host memory. Read at once.
        src: The same.
        num_bytes: Size of each copy, in bytes.
        stream: A CUDA stream's handle; not the default stream.

    Raises:
        ValueError: Names the argument at fault; nothing has been queued.
        RuntimeError: CUDA refuses.
    """

def copy_by_kernel(
    dst: npt.NDArray[np.int64], src: npt.NDArray[np.int64], num_bytes: int, stream: int
) -> None:
    """``copy_batch``, as a kernel: for many small blocks."""

class GpuSlab:
    """Reserved addresses of a GPU; granules of them are backed by memory.

    Nothing on the device may use a granule when it is unmapped, or the slab when it is dropped.

    Raises:
        RuntimeError: The driver refuses.
    """

    def __init__(self, num_bytes: int, device: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def granule_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    def map(self, offset: int, num_bytes: int) -> list[int]: ...
    def unmap(self, offset: int, num_bytes: int) -> int: ...
