"""Options of vLLM: those that banaserve adds, and those that it sets itself and so refuses."""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
import json
import textwrap
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.engine.compat.config import UsageContext, VllmConfig, is_on_cpu
from banaserve.engine.compat.front import server as compat
from banaserve.engine.compat.front.server import AsyncEngineArgs
from banaserve.engine.cuda_graphs import break_at_attention

T = TypeVar("T")
MIGRATION_KEY = "banaserve_migration"
"""Section of vLLM's ``additional_config`` of engines whose modules can move."""
STORE_CONNECTOR = "StoreConnector"
STATES_CONNECTOR = "StatesConnector"
"""Connector class for models that keep states beside their KV blocks."""
WORKER_EXTENSION = "banaserve.mains.worker.WorkerExtension"
PAGE_LAYOUT = "LBHNC"
"""Layout of KV of engines whose modules can move: layer, block, head, token, key and value."""
_ROTARY = "rotary_embedding"
_BEFORE = "give it before --, where it is banaserve's"
_ONE_ENGINE = "each engine is one data-parallel rank: give more instances with --pd or --colocated"
_ONE_SERVER = "banaserve has one API server of its own, over HTTP"


def section(config: VllmConfig, key: str, kind: type[T]) -> T | None:
    """Return section ``key`` of vLLM's ``additional_config`` as a ``kind``; None without it.

    Raises:
        UserError: The section is malformed.
    """
    extra = config.additional_config
    given = extra.get(key) if isinstance(extra, dict) else None
    if given is None:
        return None
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as wrong:
        raise UserError(f"{key}: {wrong}") from wrong


class _Parser(compat.FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{self._nearest(message)}")

    def _nearest(self, message: str) -> str:
        if not message.startswith("unrecognized"):
            return ""
        words = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        known = [name for action in self._actions for name in action.option_strings]
        found = difflib.get_close_matches(words[0], known, 1, 0.6) if words else []
        return f"; did you mean {found[0]}?" if found else ""


def parse_vllm_argv(argv: list[str]) -> Namespace:
    """Parse vLLM's options with vLLM's own parser.

    Raises:
        UserError: vLLM does not know an option or refuses a value.
    """
    parser = compat.make_arg_parser(_Parser(prog="banaserve serve"))
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            args = parser.parse_args(argv)
        compat.validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError) as refused:
        raise UserError(str(refused)) from refused
    except SystemExit as ended:
        if not ended.code:
            raise
        words = said.getvalue().strip().splitlines()
        raise UserError(words[-1] if words else "vLLM refused its options") from ended
    return args


def engine_config(args: Namespace) -> VllmConfig:
    """Return the configuration of every engine, from vLLM's parsed options.

    vLLM updates some options in ``args``, where its API server reads them: parsers of reasoning.
    ``--otlp-traces-endpoint`` stays in ``args`` alone: banaserve traces requests over all engines,
    whereas each client of an engine would make a separate span of its leg.

    Raises:
        UserError: The options and the model do not fit together.
    """
    if MIGRATION_KEY in args.additional_config:
        break_at_attention(args)
    config = _made(args)
    if uses_store(config) and config.model_config.is_hybrid:
        config = _with_states(args, config)
    if is_on_cpu():
        rotate_latents_in_torch(config)
    config.observability_config.otlp_traces_endpoint = None
    return config


def _short(error: Exception) -> str:
    """Return the error's words in one line, cut where they are long."""
    return textwrap.shorten(str(error), 500, placeholder=" ...")


def _made(args: Namespace) -> VllmConfig:
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError, NotImplementedError) as refused:
        raise UserError(f"vLLM cannot serve this: {_short(refused)}") from refused
    except RuntimeError as unfit:
        if not args.reasoning_parser:
            raise
        words = f"--reasoning-parser {args.reasoning_parser} does not fit this model"
        raise UserError(f"{words}: {_short(unfit)}") from unfit


def pools(config: VllmConfig) -> bool:
    """Return whether engines answer with a result of the whole prompt, such as an embedding.

    Then there is nothing to decode.
    """
    return bool(config.model_config.runner_type == "pooling")


def uses_store(config: VllmConfig) -> bool:
    """Return whether engines hand blocks over through the store's connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector in (STORE_CONNECTOR, STATES_CONNECTOR)


def _with_states(args: Namespace, config: VllmConfig) -> VllmConfig:
    """Return the configuration for a model with states (Mamba, linear attention) beside KV blocks.

    The store keeps the states after prefixes, so vLLM's prefix cache, which would keep more states,
    is off: a sequence has only its newest state. An option that requires more states is refused.
    """
    architecture = config.model_config.architecture
    for option, is_given in (
        ("--enable-prefix-caching", bool(args.enable_prefix_caching)),
        ("--mamba-cache-mode", args.mamba_cache_mode not in (None, "none")),
        ("--speculative-config", config.speculative_config is not None),
    ):
        if is_given:
            raise UserError(
                f"{option}: {architecture} keeps states of Mamba or linear-attention layers, of "
                "which the store keeps one a prefix: leave it out, or serve without the store: "
                "--colocated N --no-kv-store"
            )
    args.enable_prefix_caching = False
    args.kv_transfer_config = copy.copy(args.kv_transfer_config)
    args.kv_transfer_config.kv_connector = STATES_CONNECTOR
    return _made(args)


def rotate_latents_in_torch(config: VllmConfig) -> None:
    """Make engines of a model with MLA rotate positions in PyTorch, on a CPU.

    vLLM 0.32's rotary kernel for CPUs treats queries of shape ``[tokens, heads, size]``, which only
    MLA passes, as having one head, and rotates other elements, of the same number: answers depend
    on the rest of the batch and are not those of the model. The user's own setting of the kernel in
    ``--compilation-config`` is kept.
    """
    asked = config.compilation_config.custom_ops
    if config.model_config.use_mla and not any(one[1:] == _ROTARY for one in asked):
        config.compilation_config.custom_ops = [*asked, f"-{_ROTARY}"]


def goes_without_rotary_kernel(config: VllmConfig) -> bool:
    """Return whether the model has MLA and its engines rotate positions in PyTorch."""
    is_named = f"-{_ROTARY}" in config.compilation_config.custom_ops
    return config.model_config.use_mla and is_named


def load_parsers(args: Namespace) -> None:
    """Load the parsers of tool calls and reasoning; call after ``engine_config`` with ``args``.

    Raises:
        UserError: There is no such parser.
    """
    try:
        compat.load_parsers(args)
    except (KeyError, OSError) as missing:
        raise UserError(f"{missing.args[-1] if missing.args else missing}") from missing


def store_options(socket_path: str, salt: str, *, cost_gate: bool = True) -> list[str]:
    """Return vLLM's options for the store's connector, with those of ``ConnectorOptions``.

    Blocks whose fetch fails are computed again rather than failing the request.
    """
    transfer = {
        "kv_connector": STORE_CONNECTOR,
        "kv_connector_module_path": "banaserve.engine.connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": socket_path,
            "salt": salt,
            "cost_gate": cost_gate,
        },
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def common_options() -> list[str]:
    """Return vLLM's options of every banaserve engine.

    The multimodal processor cache assumes one engine behind the front door, so it is off.
    """
    return [
        "--worker-extension-cls",
        WORKER_EXTENSION,
        "--mm-processor-cache-gb",
        "0",
    ]


def preble_options() -> list[str]:
    """Return vLLM's options of engines that schedule waiting requests in Preble's order."""
    return ["--scheduler-cls", "banaserve.engine.preble_scheduler.PrebleScheduler"]


def _is_many(value: Any) -> bool:
    return value is not None and value > 1


_TAKEN: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("--api-key", bool, f"{_BEFORE}, and guards every path"),
    ("--uds", bool, _ONE_SERVER),
    ("--grpc", bool, _ONE_SERVER),
    ("--headless", bool, _ONE_SERVER),
    ("--api-server-count", _is_many, _ONE_SERVER),
    ("--data-parallel-size", _is_many, _ONE_ENGINE),
    ("--nnodes", _is_many, "all engines run on this machine"),
    ("--enable-fault-tolerance", bool, "banaserve starts failed engines again: leave it out"),
    (
        "--mm-processor-cache-gb",
        bool,
        "it takes all engines for one, so requests would lack their images: leave it out",
    ),
)


def refuse_taken(args: Namespace, config: ServeConfig, model: str) -> None:
    """Refuse options that were given to vLLM and that banaserve would not follow.

    Args:
        model: Model that banaserve passes to vLLM to load.

    Raises:
        UserError: Such an option is given.
    """
    for option, is_given, advice in _TAKEN:
        if is_given(_given(args, option)):
            _refuse(option, advice)
    if tag := _given(args, "model_tag"):
        raise UserError(f"{tag} is left over: name one model, first or with --model")
    for option, value in (("--model", model), ("--host", config.host), ("--port", config.port)):
        if _given(args, option) != value:
            _refuse(option, _BEFORE)
    transfer = _given(args, "--kv-transfer-config")
    if config.kv_store and getattr(transfer, "kv_connector", "") != STORE_CONNECTOR:
        _refuse("--kv-transfer-config", "KV goes through banaserve's store: leave it out")
    if config.kv_store and _given(args, "--enable-return-routed-experts"):
        _refuse("--enable-return-routed-experts", "the store keeps no routing: leave it out")
    if is_on_cpu() and _given(args, "--enable-expert-parallel"):
        # vLLM 0.32 without banaserve also ends in a segmentation fault.
        _refuse("--enable-expert-parallel", "on a CPU its workers die of it: leave it out")
    if _given(args, "--worker-extension-cls") != WORKER_EXTENSION:
        _refuse("--worker-extension-cls", "banaserve needs its own: leave it out")


def _refuse(option: str, advice: str) -> NoReturn:
    raise UserError(f"{option} cannot go to vLLM: {advice}")


def _given(args: Namespace, option: str) -> Any:
    return getattr(args, option.removeprefix("--").replace("-", "_"), None)
