"""What vLLM's engine client can do and several engines behind one store cannot, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from vllm.engine.protocol import EngineClient

_WEIGHTS = (
    "weights stay as they are while banaserve serves, since its store holds KV of these: restart it"
)
_FAULTS = "banaserve starts failed engines again by itself: see /ready and `banaserve status`"
_SCALE = "the number of instances is set at start, with --pd"


_CHANGE_WEIGHTS = frozenset({"discard", "load_model", "sleep"})
_LIGHT_SLEEP = 1


def check_weights_stay(method: str) -> None:
    """Return if this method of vLLM's workers leaves the weights that the store's KV is of.

    Raises:
        NotImplementedError: It does not, as ``reload_weights``.
    """
    if "weight" in method or method in _CHANGE_WEIGHTS:
        raise NotImplementedError(f"{method}: {_WEIGHTS}")


def check_sleep(level: int) -> None:
    """Return if a sleep of this level keeps the weights.

    Raises:
        NotImplementedError: What wakes up would compute with none, into the store.
    """
    if level > _LIGHT_SLEEP:
        raise NotImplementedError(f"sleep level {level} throws weights away: use level 1")


def _refusing(words: str) -> Callable[..., Coroutine[Any, Any, NoReturn]]:
    async def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(words)

    return refuse


class Refusals(EngineClient):
    """Each of these is answered 501."""

    init_weight_transfer_engine = _refusing(_WEIGHTS)
    shutdown_weight_transfer_engine = _refusing(_WEIGHTS)
    start_weight_update = _refusing(_WEIGHTS)
    start_draft_weight_update = _refusing(_WEIGHTS)
    update_weights = _refusing(_WEIGHTS)
    finish_weight_update = _refusing(_WEIGHTS)
    update_weight_version = _refusing(_WEIGHTS)
    get_weight_version = _refusing(_WEIGHTS)
    compute_weight_checksums = _refusing(_WEIGHTS)
    handle_fault = _refusing(_FAULTS)
    get_status = _refusing(_FAULTS)
    scale_elastic_ep = _refusing(_SCALE)
