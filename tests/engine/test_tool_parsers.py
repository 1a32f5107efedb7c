"""Parser of tool calls by default: the one that reads what the chat template writes."""

from __future__ import annotations

import copy
import json
import shutil
from argparse import Namespace
from types import SimpleNamespace

import pytest

import small_model
from banaserve.engine import engine_args
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.tool_parsers import FAMILIES, OPTIONS, choose_tool_parser

TOKENS = {"<jupyter_start>": "<|python_tag|>", "<jupyter_text>": "[TOOL_CALLS]"}
TEMPLATE = """{% if tools %}TOOLS{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ARGUMENTS = "{{ call.function.arguments | tojson }}"
FUNCTION = '{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}"
HERMES = f"<tool_call>\n{FUNCTION}\n</tool_call>"
LLAMA = FUNCTION.replace("arguments", "parameters", 1)
MISTRAL = f"[TOOL_CALLS][{FUNCTION}]"
_EACH = "{% for key, value in call.function.arguments.items() %}EACH{% endfor %}"
CODER = (
    "<tool_call>\n<function={{ call.function.name }}>\n"
    + _EACH.replace("EACH", "<parameter={{ key }}>\n{{ value }}\n</parameter>\n")
    + "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{{ call.function.name }}\n"
    + _EACH.replace("EACH", "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n")
    + "</tool_call>"
)
UNKNOWN = f"CALLS {FUNCTION} AT ONCE"


def template(call: str, tools: str = "{{ tools | tojson }}") -> str:
    return TEMPLATE.replace("TOOLS", tools).replace("CALL", call, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Namespace, VllmConfig]:
    """Options and configuration for a model whose tokenizer knows two marks of tool calls."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copytree(small_model.resolve().path_or_id, folder, dirs_exist_ok=True)
    known = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for token, mark in TOKENS.items():
        known = known.replace(json.dumps(token), json.dumps(mark))
    (folder / "tokenizer.json").write_text(known, encoding="utf-8")
    args = engine_args.parse_vllm_argv(["--model", str(folder), "--enforce-eager"])
    return args, engine_args.engine_config(args)


def of_family(config: VllmConfig, family: str) -> VllmConfig:
    other = copy.copy(config)
    other.model_config = copy.copy(config.model_config)
    other.model_config.hf_config = SimpleNamespace(model_type=family)
    return other


@pytest.mark.parametrize(
    ("family", "chat_template", "name", "problem"),
    [
        ("qwen2", template(HERMES), "hermes", ""),
        ("qwen3_moe", template(HERMES), "hermes", ""),
        ("qwen3_moe", template(CODER), "qwen3_coder", ""),
        ("glm4_moe", template(GLM), "glm47", ""),
        ("llama", template(LLAMA), "llama3_json", ""),
        ("llama", template(HERMES), "hermes", ""),
        ("llama", template(UNKNOWN), "", "chat template of llama"),
        ("mistral", template(MISTRAL), "mistral", ""),
        ("gpt_oss", template(UNKNOWN), "openai", ""),
        ("gpt2", template(HERMES), "", "chat template of gpt2"),
        ("glm4_moe", template(HERMES), "", "chat template of glm4_moe"),
        # Of a model that is told of no tools there is nothing to say.
        ("qwen2", template(HERMES, tools="some"), "", ""),
        ("qwen2", "{{ raise_exception('no tools') }}", "", ""),
    ],
)
def test_the_parser_reads_what_the_template_writes(
    made: tuple[Namespace, VllmConfig], family: str, chat_template: str, name: str, problem: str
) -> None:
    args, config = Namespace(**vars(made[0])), of_family(made[1], family)
    args.chat_template = chat_template
    choice = choose_tool_parser(args, config)
    assert choice.name == name
    assert problem in choice.problem
    assert (OPTIONS in str(choice)) == bool(problem)


def test_a_parser_that_does_not_fit_the_tokenizer_is_one_line() -> None:
    plain = small_model.resolve().path_or_id  # without the marks
    args = engine_args.parse_vllm_argv(["--model", plain, "--enforce-eager"])
    args.chat_template = template(MISTRAL)
    choice = choose_tool_parser(args, of_family(engine_args.engine_config(args), "mistral"))
    assert choice.name == ""
    assert str(choice).startswith("mistral is not used: ")
    assert OPTIONS in str(choice)
    assert "\n" not in str(choice)


def test_every_parser_of_a_family_is_one_of_vllms(made: tuple[Namespace, VllmConfig]) -> None:
    for name in {name for names in FAMILIES.values() for name in names}:
        words = ["--model", "m", "--enable-auto-tool-choice", "--tool-call-parser", name]
        args = engine_args.parse_vllm_argv(words)
        args.structured_outputs_config = made[0].structured_outputs_config
        engine_args.load_parsers(args)
