"""vLLM's API server: its options, its application and the engine client that it talks to.

Modules that moved between versions are imported from the place where the installed vLLM has them.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import vllm.envs as envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.logging_utils import UvicornAccessLogFilter
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager
from vllm.tracing.otel import get_span_exporter
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from banaserve.base.errors import UserError
from banaserve.engine.compat.config import VllmConfig

try:  # vLLM 0.33 and later
    from vllm.entrypoints.common.cli_args import (  # type: ignore[import-not-found, unused-ignore]
        make_arg_parser,
        validate_parsed_serve_args,
    )
except ModuleNotFoundError as missing:
    if not (missing.name or "").startswith("vllm."):
        raise  # something else is not installed
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = [
    "AsyncEngineArgs",
    "EngineClient",
    "FlexibleArgumentParser",
    "InputProcessor",
    "build_app",
    "extract_prompt_components",
    "get_span_exporter",
    "make_arg_parser",
    "validate_parsed_serve_args",
]


class ServerStub:
    """Stand-in for the server that vLLM's handler of engine errors ends: here engines restart."""

    should_exit = False


def keep_serving(
    app: Any, error: type[Exception], answer: Callable[[Any, Any], Awaitable[Any]]
) -> None:
    """Make vLLM's application answer one more kind of error.

    Args:
        app: Application that ``build_app`` returned; its middleware stack is rebuilt.
    """
    app.add_exception_handler(error, answer)
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built it without this handler


def load_parsers(args: Namespace) -> None:
    """Load users' own parsers of tool calls and reasoning, as vLLM's server does.

    Args:
        args: vLLM's options, from which the engines' configuration has been made.

    Raises:
        KeyError: There is no parser of a given name.
    """
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_api_server_args(args)


def shorten_access_log(args: Namespace) -> None:
    """Leave the paths of ``--disable-access-log-for-endpoints`` out of uvicorn's access log."""
    paths = [path.strip() for path in (args.disable_access_log_for_endpoints or "").split(",")]
    logging.getLogger("uvicorn.access").addFilter(UvicornAccessLogFilter(paths))


def is_in_dev_mode() -> bool:
    """Return whether vLLM's application has the endpoints of its development mode."""
    return bool(envs.VLLM_SERVER_DEV_MODE)


async def bind_engines(app: Any, args: Namespace, client: EngineClient, tasks: Any) -> None:
    """Make vLLM's application serve ``client``, and continue after an engine has failed.

    Raises:
        UserError: A parser does not fit the model's tokenizer.
    """
    try:
        await init_app_state(client, app.state, args, tasks)
    except TypeError as unfit:
        if args.tool_call_parser or args.reasoning_parser:
            raise UserError(str(unfit).partition("\n")[0]) from unfit
        raise
    app.state.server = ServerStub()


def xgrammar_vocabulary(config: VllmConfig) -> str:
    """Return the vocabulary with which engines compile grammars, as xgrammar's JSON. Blocks.

    Returns:
        Empty text if there is no tokenizer, or none that xgrammar supports.
    """
    import xgrammar  # takes a second, and few requests have grammars

    model = config.model_config
    if model.skip_tokenizer_init:
        return ""
    tokenizer = cached_tokenizer_from_config(model_config=model)
    try:
        made = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.get_vocab_size())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return ""
    return str(made.serialize_json())


def is_beyond_xgrammar(schema: Any) -> bool:
    """Return whether vLLM does not give a JSON schema to xgrammar, but to guidance."""
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    return bool(has_xgrammar_unsupported_json_features(schema))


def keep_alive_s() -> int:
    """Return the seconds for which vLLM's server keeps an idle connection."""
    seconds: int = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    return seconds
