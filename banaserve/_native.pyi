import numpy as np
import numpy.typing as npt

def copy_regions(
    dst_base: int,
    src_base: int,
    dst_offsets: npt.NDArray[np.int64],
    src_offsets: npt.NDArray[np.int64],
    num_bytes: int,
    dst_size: int,
    src_size: int,
) -> None:
    """Copy ``num_bytes`` for each pair of offsets, without the GIL.

    Raises:
        ValueError: A copy would leave the given sizes, or source and target overlap.
    """
