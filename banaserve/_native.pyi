from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def copy_instructions() -> list[str]:
    """Instruction sets for streaming copies on this processor, widest first: avx512, avx2."""

def copy_regions(
    dst_base: int,
    src_base: int,
    dst_offsets: npt.NDArray[np.int64],
    src_offsets: npt.NDArray[np.int64],
    num_bytes: int,
    dst_size: int,
    src_size: int,
    streaming: bool = False,
    instructions: str = "",
) -> None:
    """Copy ``num_bytes`` for each pair of offsets, without the GIL.

    ``streaming`` writes past the caches: for targets that this processor does not read soon.
    ``instructions`` are one of ``copy_instructions``; empty for the widest.

    Raises:
        ValueError: A copy would leave the given sizes, or source and target overlap.
    """

def copy_regions_checksummed(
    dst_base: int,
    src_base: int,
    dst_offsets: npt.NDArray[np.int64],
    src_offsets: npt.NDArray[np.int64],
    num_bytes: int,
    dst_size: int,
    src_size: int,
    streaming: bool = False,
    instructions: str = "",
) -> int:
    """``copy_regions``; the XXH3-64 of everything copied, in the order of the copies.

    Raises:
        ValueError: A copy would leave the given sizes, or source and target overlap.
        RuntimeError: The xxhash package's library cannot be used.
    """

class PrefixTree:
    """See ``banaserve_route.policies.prefixes.tree.PrefixTree``.

    Raises:
        ValueError: ``unit_bytes`` is not 1, 2, 4 or 8.
    """

    def __init__(
        self, unit_bytes: int, max_target_bytes: int, max_bytes: int, is_fifo: bool = False
    ) -> None: ...
    def add(self, prompt: bytes, target: str) -> None: ...
    def match(self, prompt: bytes, tokens_per_unit: float = 1.0) -> dict[Any, int]: ...
    def trim(self, prompt: bytes, target: str, num_units: int) -> None: ...
    def forget(self, target: str) -> None: ...
    def dump(self) -> list[tuple[int, bytes, dict[Any, int]]]: ...
    def target_bytes(self, target: str) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...

class Line:
    """Online least squares y = base + slope x; neither is ever negative.

    Starts from ``slope``, with the weight of one sample at ``unit`` from the mean of x. The weight
    of a sample falls with each later one.

    Attributes:
        base: Time in ms at x = 0.
        slope: Time in ms for each unit of x.
    """

    def __init__(self, slope: float, unit: float) -> None: ...
    def __call__(self, x: float) -> float:
        """Return the predicted y."""

    def learn(self, x: float, y: float) -> None:
        """Add one sample."""

    @property
    def base(self) -> float: ...
    @property
    def slope(self) -> float: ...

def request_costs(
    views: Sequence[Any],
    hits: Mapping[Any, int],
    paces: Mapping[Any, float],
    peers: Mapping[Any, tuple[float, float]],
    least_missed: float,
    fetch: float,
    future: float,
    crowd: float,
    prefill: float,
    others: float,
    places: float,
    answer_ms: float,
) -> tuple[dict[Any, float], list[Any], float, list[Any]]:
    """Return costs, the cheapest views, the new ``places`` and the ids of full replicas.

    The terms are those of ``banaserve_route.policies.predicted_latency``.

    Args:
        peers: Requests and tokens ahead at a mean replica of each peer.

    Raises:
        ValueError: There is no view.
    """
