"""Choice of the parser that finds tool calls in a model's answers, if the user gives none."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.front import tool_parsers as compat

OPTIONS = "--enable-auto-tool-choice --tool-call-parser NAME"
_HARMONY = "gpt_oss"
_QWEN = ("qwen3_coder", "hermes")
_MISTRAL = ("mistral",)
FAMILIES = {
    "apertus": ("apertus",),
    "deepseek_v3": ("deepseek_v3", "deepseek_v31"),
    "ernie4_5_moe": ("ernie45",),
    "gemma4": ("gemma4",),
    "glm4_moe": ("glm47",),
    _HARMONY: ("openai",),
    "granite": ("granite", "granite4"),
    "granitemoe": ("granite", "granite4"),
    "granitemoehybrid": ("granite4",),
    "hunyuan_v1_moe": ("hunyuan_a13b",),
    "jamba": ("jamba",),
    "llama": ("hermes", "llama3_json"),
    "minimax_m2": ("minimax_m2",),
    "ministral3": _MISTRAL,
    "mistral": ("mistral", "hermes"),
    "mistral3": _MISTRAL,
    "mixtral": ("mistral", "hermes"),
    "mllama": ("llama3_json",),
    "olmo3": ("olmo3",),
    "qwen2": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "seed_oss": ("seed_oss",),
    "smollm3": ("hermes",),
}
"""Parsers by the model's type; the first takes the fewest texts for calls.

A parser is used only if it reads the calls that the model's own chat template writes.
"""
_BEGINS = {"llama3_json": ("{", "<|python_tag|>")}
"""Possible beginnings of a written call, for parsers that take any JSON in a text for a call."""


@dataclass(frozen=True, slots=True)
class ToolParserChoice:
    """A parser's name, or the reason why there is none.

    Attributes:
        name: Name in vLLM's registry; empty if no parser is known with certainty.
        problem: Reason why no parser of the family is used; empty for none.
    """

    name: str = ""
    problem: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"calls are found by {self.name}, which reads what the chat template writes"
        return f"{self.problem}: give {OPTIONS} for them" if self.problem else ""


def choose_tool_parser(args: Namespace, config: VllmConfig) -> ToolParserChoice:
    """Choose the parser that vLLM's server needs for ``tools`` in requests.

    Blocks, since it reads a tokenizer.

    Args:
        args: vLLM's options, in which no tool parser is given; they are not changed.
    """
    tokenizer = compat.tokenizer_of(config)
    if tokenizer is None:
        return ToolParserChoice()
    family = config.model_config.hf_config.model_type
    candidates = FAMILIES.get(family, ())
    written = ""
    if compat.is_mistral_tokenizer(tokenizer):
        candidates = _MISTRAL  # Mistral's library writes the calls itself
    elif family != _HARMONY:  # whose calls vLLM writes itself
        written = compat.written_call(tokenizer, args.chat_template)
        if not written:
            return ToolParserChoice()
    problem = f"no parser is known for how the chat template of {family} writes calls"
    for name in candidates:
        if not written.lstrip().startswith(_BEGINS.get(name, "")):
            continue
        try:
            if compat.parsed_call(name, args, config, tokenizer, written):
                return ToolParserChoice(name)
        except Exception as unfit:  # of parsers, which may fail with anything
            problem = f"{name} is not used: {' '.join(str(unfit).split())[:200]}"
    return ToolParserChoice(problem=problem)
