"""Tools in requests: a parser by the model's chat template, or a 400 with the options to give."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import small_model

pytestmark = pytest.mark.room

TOOL = {
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
ASKED = [{"role": "user", "content": "Look up the word tree."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASKED, "tools": [{"type": "function", "function": TOOL}]},
    "responses": {"input": ASKED, "tools": [{"type": "function", **TOOL}]},
    "messages": {
        "messages": ASKED,
        "max_tokens": 4,
        "tools": [{"name": "look_up", "input_schema": TOOL["parameters"]}],
    },
}
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def asked(run: Any, path: str) -> httpx.Response:
    body = {"model": "smollm2-135m", **REQUESTS[path]}
    return httpx.post(f"{run.url}/v1/{path}", json=body, timeout=60.0)


def with_template(folder: Path) -> tuple[str, ...]:
    """Options for the small model, with a chat template that writes calls as Hermes does."""
    model = small_model.resolve()
    shutil.copytree(model.path_or_id, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ("--model", str(folder), "--served-model-name", model.served_name)


def test_the_parser_of_the_chat_template_is_given(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    run = serve(*with_template(tmp_path))
    assert "calls are found by hermes" in run.tails()
    for path in REQUESTS:
        assert asked(run, path).status_code == 200, path


def test_what_the_user_says_of_tools_stays(serve: Callable[..., Any], tmp_path: Path) -> None:
    run = serve(*with_template(tmp_path), "--no-enable-auto-tool-choice")
    assert "hermes" not in run.tails()
    assert asked(run, "chat/completions").status_code == 400


# vLLM's answer to responses takes no notice of tools that it has no parser for.
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_without_a_parser_the_answer_names_both_options(server: Any, path: str) -> None:
    answer = asked(server, path)
    assert answer.status_code == 400
    assert "--enable-auto-tool-choice" in answer.text
    assert "--tool-call-parser" in answer.text
