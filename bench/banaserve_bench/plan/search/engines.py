"""Instances of a model on GPUs of one kind, by the number of GPUs that share its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve_bench.plan.search.trial import Device
from banaserve_bench.silicon.modelled_engine import modelled_engine

DEFAULT_GPUS = 8
_PARALLEL = (1, 2, 4, 8)


class AskedEngine(NamedTuple):
    """Model and GPUs that are asked for.

    Attributes:
        tensor_parallel: Number of GPUs of each instance; None to try several.
        link_bytes_per_s: Bandwidth of a GPU's share of the network; None for the usual one.
    """

    model: str
    kind: str
    tensor_parallel: int | None
    num_gpus: int
    link_bytes_per_s: float | None


def find_devices(asked: AskedEngine) -> list[Device]:
    """Return the instances that the GPUs can be shared out to, those of the fewest GPUs first.

    Raises:
        UserError: Model or GPU is unknown, or the model fits no instance; the message is that of
            the largest.
    """
    sizes = _PARALLEL if asked.tensor_parallel is None else (asked.tensor_parallel,)
    fitting = [one for one in sizes if asked.num_gpus % one == 0]
    if not fitting:
        raise UserError(
            f"{asked.num_gpus} GPUs are no instances of {asked.tensor_parallel}: give a multiple "
            "with --gpus"
        )
    found: list[Device] = []
    problem: UserError | None = None
    for size in fitting:
        try:
            found.append(_device(asked, size))
        except UserError as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return found


def _device(asked: AskedEngine, size: int) -> Device:
    engine = modelled_engine(asked.model, asked.kind, size, asked.link_bytes_per_s)
    return Device(engine.profile, engine.measured, size, asked.kind)


def device_words(devices: tuple[Device, ...]) -> Iterator[str]:
    """Yield a line about the memory of each kind of instance on GPUs."""
    for one in devices:
        if one.kind:
            model, tokens = one.profile.model, one.profile.memory.kv_tokens
            yield (
                f"an instance of {one.gpus} x {one.kind} keeps {tokens:,} tokens of KV, "
                f"{model.token_bytes / 1024:,.0f} KiB each on a GPU; its link carries "
                f"{one.profile.link.bytes_per_s / 1e9:g} GB/s for each GPU"
            )
