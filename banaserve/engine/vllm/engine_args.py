"""Our sections of vLLM's ``additional_config``, which goes to engines unread.

From vLLM's command-line options to the configuration of one engine.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
from argparse import Namespace
from typing import NoReturn, TypeVar

import msgspec

from banaserve.engine.vllm.compat import server as compat
from banaserve.engine.vllm.compat.config import UsageContext, VllmConfig
from banaserve.engine.vllm.compat.server import AsyncEngineArgs
from banaserve.errors import UserError

T = TypeVar("T")


def section(config: VllmConfig, key: str, kind: type[T]) -> T | None:
    """The section ``key`` as a ``kind``; None where there is none.

    Raises:
        UserError: It is malformed.
    """
    extra = config.additional_config
    given = extra.get(key) if isinstance(extra, dict) else None
    if given is None:
        return None
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as wrong:
        raise UserError(f"{key}: {wrong}") from wrong


STORE_CONNECTOR = "StoreConnector"
WORKER_EXTENSION = "banaserve.engine.vllm.worker.WorkerExtension"


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
    """vLLM's own parse of its own options.

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


def engine_config(argv: list[str]) -> VllmConfig:
    """The configuration of every engine, from vLLM's options.

    Raises:
        UserError: The options and the model do not fit together.
    """
    args = parse_vllm_argv(argv)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError, NotImplementedError) as refused:
        first = str(refused).strip().splitlines()
        raise UserError(f"vLLM cannot serve this: {' '.join(first)[:400]}") from refused


def store_options(socket_path: str, salt: str) -> list[str]:
    """vLLM options that put the store's connector into every engine.

    A failed fetch is computed again rather than failing the request.
    """
    transfer = {
        "kv_connector": STORE_CONNECTOR,
        "kv_connector_module_path": "banaserve.engine.vllm.kv_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket_path, "salt": salt},
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def common_options() -> list[str]:
    """Options of every banaserve engine.

    The multimodal processor cache assumes one engine behind the front door, so it is off.
    """
    return [
        "--worker-extension-cls",
        WORKER_EXTENSION,
        "--mm-processor-cache-gb",
        "0",
    ]


def preble_options() -> list[str]:
    """Options of engines that take waiting requests in Preble's order."""
    return ["--scheduler-cls", "banaserve.engine.vllm.preble_scheduler.PrebleScheduler"]


def computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware or close to it.

    Without AVX-512 they are emulated: 9 GFLOP/s against 67 in float32 on one AVX2 core.
    """
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
