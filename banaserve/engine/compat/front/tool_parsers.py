"""vLLM's parsers of tool calls, and the form in which a model's chat template writes a call."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.mistral import is_mistral_tokenizer

from banaserve.engine.compat.config import VllmConfig

__all__ = ["is_mistral_tokenizer"]

_NAME, _ARGUMENTS = "look_up_city", {"city": "Paris"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look up a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_ASKED = {"role": "user", "content": "Where is it?"}
_CALLED = {
    "role": "assistant",
    "content": "",
    # Templates of Mistral's models refuse ids of another length.
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": _NAME, "arguments": _ARGUMENTS},
        }
    ],
}


def tokenizer_of(config: VllmConfig) -> Any:
    """Return the tokenizer that vLLM's server uses, which is cached; None for none. Blocks."""
    if config.model_config.skip_tokenizer_init:
        return None
    return cached_tokenizer_from_config(model_config=config.model_config)


def written_call(tokenizer: Any, chat_template: str | None) -> str:
    """Return the text in which the model's chat template writes a tool call.

    Args:
        chat_template: Value of ``--chat-template``; None for the model's own template.

    Returns:
        Empty text if the template does not describe tools to the model, or cannot be used.
    """
    template = load_chat_template(chat_template)

    def rendered(messages: list[dict[str, Any]], *, goes_on: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=[_TOOL],
            chat_template=template,
            add_generation_prompt=goes_on,
            tokenize=False,
        )
        return text

    try:
        prompt = rendered([_ASKED], goes_on=True)
        whole = rendered([_ASKED, _CALLED], goes_on=False)
    except Exception:  # a template may raise anything, and a tokenizer may have no template
        return ""
    if _NAME not in prompt:
        return ""
    pairs = zip(prompt, whole, strict=False)
    common = next((at for at, (one, other) in enumerate(pairs) if one != other), len(prompt))
    answer = whole[common:].rstrip()
    return answer.removesuffix(str(getattr(tokenizer, "eos_token", None) or ""))


def parsed_call(name: str, args: Namespace, config: VllmConfig, tokenizer: Any, text: str) -> bool:
    """Return whether parser ``name`` finds in ``text`` the call that ``written_call`` has written.

    Args:
        args: vLLM's options, with the reasoning parser that the parser is combined with.

    Raises:
        Exception: The parser does not fit the tokenizer or the reasoning parser; of any class.
    """
    model = config.model_config
    combined = ParserManager.get_parser(
        tool_parser_name=name,
        reasoning_parser_name=args.structured_outputs_config.reasoning_parser,
        enable_auto_tools=True,
        model_name=model.model,
        is_harmony=model.hf_config.model_type == "gpt_oss",
        tool_strict_level=args.tool_strict_level,
        tokenizer=tokenizer,
    )
    if not text:
        return True
    asked = {"messages": [_ASKED], "tools": [_TOOL], "tool_choice": "auto"}
    request = ChatCompletionRequest.model_validate(asked)
    made: Any = combined
    found = made.tool_parser_cls(tokenizer, request.tools).extract_tool_calls(text, request)
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in found.tool_calls]
    return calls == [(_NAME, _ARGUMENTS)]
