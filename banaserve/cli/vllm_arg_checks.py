"""Options of vLLM that banaserve decides itself: there they do nothing, or harm."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from banaserve.config import ServeConfig
from banaserve.engine.vllm.engine_args import STORE_CONNECTOR, WORKER_EXTENSION
from banaserve.errors import UserError

_BEFORE = "give it before --, where it is banaserve's"
_ONE_ENGINE = "each engine is one data-parallel rank: give more instances with --pd or --colocated"
_ONE_SERVER = "banaserve has one API server of its own, over HTTP"


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_many(value: Any) -> bool:
    return value is not None and value > 1


_TAKEN: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("--api-key", _is_set, f"{_BEFORE}, and guards every path"),
    ("--uds", _is_set, _ONE_SERVER),
    ("--grpc", _is_set, _ONE_SERVER),
    ("--headless", _is_set, _ONE_SERVER),
    ("--api-server-count", _is_many, _ONE_SERVER),
    ("--data-parallel-size", _is_many, _ONE_ENGINE),
    ("--nnodes", _is_many, "all engines run on this machine"),
    (
        "--mm-processor-cache-gb",
        _is_set,
        "it takes all engines for one, so requests would lack their images: leave it out",
    ),
)


def refuse_taken(args: Namespace, config: ServeConfig, model: str) -> None:
    """Refuse what vLLM was told and banaserve would not do.

    Args:
        args: vLLM's parse of its options, those that banaserve gives included.
        model: What banaserve told vLLM to load.

    Raises:
        UserError: One of them is given.
    """
    for option, is_given, advice in _TAKEN:
        if is_given(_given(args, option)):
            _refuse(option, advice)
    if tag := _given(args, "model_tag"):
        raise UserError(f"{tag}: name the model first, banaserve serve {tag}, or with --model")
    for option, value in (("--model", model), ("--host", config.host), ("--port", config.port)):
        if _given(args, option) != value:
            _refuse(option, _BEFORE)
    transfer = _given(args, "--kv-transfer-config")
    if config.kv_store and getattr(transfer, "kv_connector", "") != STORE_CONNECTOR:
        _refuse("--kv-transfer-config", "KV goes through banaserve's store: leave it out")
    if config.kv_store and _given(args, "--enable-return-routed-experts"):
        _refuse("--enable-return-routed-experts", "the store keeps no routing: leave it out")
    if _given(args, "--worker-extension-cls") != WORKER_EXTENSION:
        _refuse("--worker-extension-cls", "banaserve needs its own: leave it out")


def _refuse(option: str, advice: str) -> NoReturn:
    raise UserError(f"{option} cannot go to vLLM: {advice}")


def _given(args: Namespace, option: str) -> Any:
    return getattr(args, option.removeprefix("--").replace("-", "_"), None)
