"""Tokens of prompts as the balancer reads them: with the model's tokenizer and chat template."""

from __future__ import annotations

import json

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from banaserve.base.errors import UserError
from banaserve.base.types import RequestId
from banaserve_route.balancer.config import PolicySettings
from banaserve_route.balancer.requests import prompt_blocks
from banaserve_route.balancer.requests.prompt_blocks import PromptReader
from banaserve_route.policies.caches.cache_view import block_keys
from banaserve_route.policies.interface import Request

WORDS = ["?", "<s>", "user", "bot", "call", "none", "a", "b", "c", "d", "e"]
ID = {word: number for number, word in enumerate(WORDS)}
TEMPLATE = """{{ bos_token }}{% for one in messages %} {{ one.role }} {{ one.content }}
{%- for call in one.tool_calls %} call {{ call.function.arguments.at }}{% endfor %}
{%- endfor %}{{ ' bot' if add_generation_prompt }}{{ mood and ' ' + mood }}
{%- if tools %}{{ raise_exception('no tools') }}{% endif %}"""
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"


class Message:
    def __init__(self, path, body):
        self.path, self.body = path, [msgspec.json.encode(body)]


@pytest.fixture
def folder(tmp_path):
    made = Tokenizer(models.WordLevel(ID, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ID["<s>"])]
    )
    made.enable_truncation(3)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": {"content": "<s>"}, "chat_template": "not this one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def reader(folder):
    made = PromptReader(str(folder))
    yield made
    made.close()


async def read(reader, path, body, adapters=frozenset(), **what):
    request = Request(RequestId("1"), 7, **what)
    return await reader.with_blocks(request, Message(path, body), {1, 2}, set(adapters))


def message(content, role="user", **more):
    return {"role": role, "content": content} | more


CALL = {"function": {"name": "f", "arguments": '{"at": "e"}'}}
TEXTS = [
    (COMPLETIONS, {"prompt": "a b c d e"}, "<s> a b c d e"),
    (COMPLETIONS, {"prompt": "a b", "add_special_tokens": False}, "a b"),
    (COMPLETIONS, {"prompt": [ID["a"], ID["b"], ID["c"]]}, "a b c"),
    (CHAT, {"messages": [message("a b")]}, "<s> user a b bot"),
    (CHAT, {"messages": [message("a")], "add_generation_prompt": False}, "<s> user a"),
    (CHAT, {"messages": [message("a")], "add_special_tokens": True}, "<s> <s> user a bot"),
    (
        CHAT,
        {"messages": [message("a"), message("b", "bot", tool_calls=[CALL])]},
        "<s> user a bot b call e bot",
    ),
    (
        CHAT,
        {"messages": [message([{"type": "text", "text": one} for one in "ab"])]},
        "<s> user a b bot",
    ),
    (CHAT, {"messages": [message("a")], "chat_template_kwargs": {"mood": "d"}}, "<s> user a bot d"),
]


@pytest.mark.parametrize(("path", "body", "text"), TEXTS)
async def test_tokens_are_those_that_vllm_computes(path, body, text, reader):
    tokens = [ID[word] for word in text.split()]
    found = await read(reader, path, body)
    assert found.num_tokens == len(tokens)
    # The last token is computed in any case.
    assert found.blocks == {size: block_keys(tokens[:-1], size) for size in (1, 2)}


NOT_READ = [
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": "a b", "truncate_prompt_tokens": 1}),
    (COMPLETIONS, {"prompt": None}),
    (CHAT, {"messages": [message([{"type": "image_url", "image_url": {"url": "x"}}])]}),
    (CHAT, {"messages": [message("a")], "tools": [{"type": "function"}]}),
    (CHAT, {"messages": [message("a")], "chat_template": "{{ 1 }}"}),
    (CHAT, {"messages": [message("a", tool_calls=[{"function": {"arguments": "no json"}}])]}),
    (CHAT, {"messages": [message("a", tool_calls=["no call"])]}),
    (b"/v1/responses", {"input": "a b"}),
]


@pytest.mark.parametrize(("path", "body"), NOT_READ)
async def test_other_prompts_are_left_to_the_tree(path, body, reader):
    found = await read(reader, path, body)
    assert (found.num_tokens, found.blocks) == (7, {})
    assert reader.counts == {"other": 1}


async def test_salts_and_adapters_are_part_of_the_keys(reader):
    body = {"prompt": "a b", "cache_salt": "s"}
    tokens = [ID["<s>"], ID["a"]]
    found = await read(reader, COMPLETIONS, body, {"fr"}, model="fr")
    assert found.blocks[1] == block_keys(tokens, 1, [["fr", "s"], ["fr"]])
    found = await read(reader, COMPLETIONS, body, {"fr"}, model="base")
    assert found.blocks[1] == block_keys(tokens, 1, [["s"]])


async def test_a_request_waits_only_for_a_short_time_and_few_are_read_at_once(reader, monkeypatch):
    monkeypatch.setattr(prompt_blocks, "_WAIT_S", 0.0)
    found = await read(reader, COMPLETIONS, {"prompt": "a"})
    assert (found.blocks, reader.counts) == ({}, {"late": 1})
    monkeypatch.setattr(prompt_blocks, "_MAX_READING", 0)
    await read(reader, COMPLETIONS, {"prompt": "a"})
    assert reader.counts == {"late": 1, "busy": 1}


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"tokenizer: cannot read"):
        PromptReader(str(folder))


async def test_without_a_template_only_chats_are_not_read(folder):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    reader = PromptReader(str(folder))
    assert (await read(reader, COMPLETIONS, {"prompt": "a"})).num_tokens == 2
    assert not (await read(reader, CHAT, {"messages": [message("a")]})).blocks
    reader.close()


@pytest.mark.parametrize(("with_tokenizer", "num_tokens"), [(True, 6), (False, 2)])
async def test_policies_count_tokens_if_there_is_a_tokenizer(
    house, folder, monkeypatch, with_tokenizer, num_tokens
):
    settings = {"tokenizer": str(folder)} if with_tokenizer else {}
    policy = PolicySettings(name="gorgo")
    balancer = await house.balance(await house.replica(), policy=policy, **settings)
    choose, seen = balancer.fleet.policy.choose, []

    def watched(request, view):
        seen.append(request.num_tokens)
        return choose(request, view)

    monkeypatch.setattr(balancer.fleet.policy, "choose", watched)
    assert (await house.ask(body=b'{"prompt": "a b c d e"}')).status == 200
    assert seen == [num_tokens]
