"""The unchanged OpenAI client against prefill and decode apart; what is refused, and how."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest

from banaserve.base.config.serve_config import DEFAULT_SKIP_PREFILL_BELOW_TOKENS
from banaserve.cli.main import main
from banaserve.contracts.trace_events import RequestTrace
from server_run import DEADLINE_S

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"
MAX_CONCURRENT = 4
CONTEXT_TOKENS = 1024
SERVE_OPTIONS = (
    *("--model", MODEL),
    *("--max-concurrent-requests", str(MAX_CONCURRENT), "--max-body-size", "1MiB"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # In bf16 the two best tokens often tie, and batches of other shapes break ties differently.
    *("--dtype", "float32", "--max-model-len", str(CONTEXT_TOKENS)),
    # What is counted must not depend on which of computing and reading is faster now.
    *("--kv-store-fetch", "always"),
    # A step of prefill is over soon: a client can leave between two of them.
    *("--max-num-batched-tokens", "256"),
)
TEXT = (
    "The history of the city of Paris begins long before the Romans, when a Celtic people lived "
    "on an island in the river Seine and built a small town there. It was then that"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CANCELLED_TOKENS = 100
"""That a stream of 400 may still get once its client leaves, which a busy machine makes later."""
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# Gauges that are zero while nothing is under way.
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "banaserve_requests_in_flight",
    "banaserve_kvstore_leased_slots",
    "banaserve_kvstore_writing_slots",
)


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def complete(client):
    def ask(prompt=TEXT, **options: Any):
        options = {"temperature": 0.0, "max_tokens": 12, **options}
        return client.completions.create(model=MODEL, prompt=prompt, **options)

    return ask


@pytest.fixture(scope="module")
def chat(client):
    def ask(messages=QUESTION, **options: Any):
        options = {"temperature": 0.0, "max_tokens": 24, **options}
        return client.chat.completions.create(model=MODEL, messages=messages, **options)

    return ask


def numbered_tokens(first: int, count: int) -> list[int]:
    """A prompt that shares no block with one of another ``first``."""
    return [100 + (first * 7919 + i * 31) % 40_000 for i in range(count)]


def busy(server) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The gauges that are not zero."""
    page = server.metrics()
    assert all(name in page for name in GAUGES[:3])
    return {
        name: shown
        for name in GAUGES
        if (shown := {labels: v for labels, v in page.get(name, {}).items() if v})
    }


# What a client sees -------------------------------------------------------------------------------


@pytest.mark.spine
def test_chat(chat):
    answer = chat()
    (choice,) = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.spine
def test_a_streamed_chat_is_the_same_and_tells_its_usage(chat):
    whole = chat()
    *pieces, last = chat(stream=True, stream_options={"include_usage": True})
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert [p.choices[0].finish_reason for p in pieces if p.choices[0].finish_reason] == ["stop"]
    assert (last.choices, last.usage) == ([], whole.usage)


def test_a_streamed_completion_is_the_same(complete):
    whole = complete()
    pieces = list(complete(stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.spine
def test_several_prompts_and_several_answers(complete):
    prompts = [TEXT, f"{TEXT} the Romans"]
    answer = complete(prompts, n=2, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    assert texts == [
        choice.text for choice in complete(prompts, n=2, temperature=1.0, seed=5).choices
    ]


def test_one_token(complete):
    answer = complete(max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"
    assert complete().choices[0].text.startswith(answer.choices[0].text)


@pytest.mark.spine
def test_a_seed_repeats_itself(complete):
    def sampled(seed: int) -> str:
        return complete(temperature=1.0, top_p=0.9, seed=seed).choices[0].text

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.spine
def test_logprobs(chat, complete):
    content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [max(token.top_logprobs, key=lambda top: top.logprob).token for token in content] == [
        token.token for token in content
    ]
    found = complete(logprobs=2).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    assert all(len(top) == 2 for top in found.logprobs.top_logprobs)


def test_echo_and_the_probabilities_of_the_prompt(server, complete):
    assert complete(echo=True).choices[0].text.startswith(TEXT)
    before = server.metric("banaserve_requests_total", way="one_leg", reason="prompt_logprobs")
    scored = complete(echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert scored.token_logprobs[0] is None
    assert all(logprob <= 0.0 for logprob in scored.token_logprobs[1:])
    after = server.metric("banaserve_requests_total", way="one_leg", reason="prompt_logprobs")
    assert after == before + 1


@pytest.mark.spine
def test_structured_output(chat):
    asked = [{"role": "user", "content": "Name a capital in Europe and its age as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    found = json.loads(chat(asked, response_format=form, max_tokens=80).choices[0].message.content)
    assert found.keys() == {"city", "age"}
    assert isinstance(found["age"], int)
    choice = chat(extra_body={"structured_outputs": {"choice": ["red", "blue"]}})
    assert choice.choices[0].message.content in ("red", "blue")


@pytest.mark.spine
def test_tools(chat):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    plain = chat(asked, tools=[WEATHER], tool_choice="none").choices[0].message
    assert plain.content
    assert not plain.tool_calls
    named = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = (
        chat(asked, tools=[WEATHER], tool_choice=named, max_tokens=60).choices[0].message.tool_calls
    )
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}


@pytest.mark.spine
def test_responses(client):
    options = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0.0}
    answer = client.responses.create(**options, max_output_tokens=24)
    assert answer.output_text == "The capital of France is Paris."
    events = list(client.responses.create(**options, max_output_tokens=24, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        answer.output_text
    )
    assert events[-1].type == "response.completed"


def test_messages(server):
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0.0, "messages": QUESTION}
    answer = server.post("/v1/messages", body).json()
    assert answer["content"] == [{"type": "text", "text": "The capital of France is Paris."}]
    counted = server.post("/v1/messages/count_tokens", body).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_models_and_tokens(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, CONTEXT_TOKENS)
    found = server.post("/tokenize", {"model": MODEL, "prompt": "naïve 🎉"}).json()
    assert found["count"] == len(found["tokens"]) > len("a 🎉")
    text = server.post("/detokenize", {"model": MODEL, "tokens": found["tokens"]}).json()
    assert text == {"prompt": "naïve 🎉"}


def test_the_probes(server):
    assert server.get("/health").status_code == 200
    assert server.get("/ready").json() == {
        "ready": True,
        "instances": {"p0": "ready", "d0": "ready"},
    }
    assert server.get("/version").json().keys() == {"version", "vllm"}
    page = server.metrics()
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total"):
        assert {dict(labels)["instance_id"] for labels in page[name]} == {"p0", "d0"}
    assert page["banaserve_kvstore_up"] == {frozenset(): 1.0}


@pytest.mark.spine
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [3, 300])
def test_vllms_metrics_count_a_request_once(server, complete, length, stream):
    """In one leg, whose engine counts as vLLM does by itself, and in two."""
    names = {
        "vllm:request_success_total": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": length,
        "vllm:prompt_tokens_total": length,
        "vllm:generation_tokens_total": 20,
        "vllm:inter_token_latency_seconds_count": 19,
    }
    before = {name: server.metric(name) for name in names}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    made = complete(
        numbered_tokens(90 + length + stream, length),
        stream=stream,
        max_tokens=20,
        extra_body={"ignore_eos": True},
        **options,
    )
    usage = [one.usage for one in made if one.usage][-1] if stream else made.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, 20)
    assert {name: server.metric(name) - before[name] for name in names} == names


# The hand-over ------------------------------------------------------------------------------------


# What a processor of logits might read: prefill's token may not be the first one.
FROM_DECODE = {"vllm_xargs": {"anything": 1}}


def first_tokens(server) -> tuple[float, float]:
    return tuple(
        server.metric("banaserve_first_tokens_total", leg=leg) for leg in ("prefill", "decode")
    )


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (TEXT, {}),
        (TEXT, {"max_tokens": 1}),
        (TEXT, {"stop": [" the Romans took"]}),
        (TEXT, {"stop": ["zzz", "."], "extra_body": {"include_stop_str_in_output": True}}),
        (TEXT, {"extra_body": {"min_tokens": 8, "stop_token_ids": [260, 30]}}),
        (TEXT, {"extra_body": {"stop_token_ids": [260]}}),
        (TEXT, {"extra_body": {"allowed_token_ids": [260, 261, 28]}}),
        (TEXT, {"logit_bias": {"260": -100}}),
        # Each symbol is three tokens or more: the first token alone is no text.
        ("🎉🎈" * 12, {}),
        ("🎉🎈" * 12, {"max_tokens": 1}),
        ("🎉🎈" * 12, {"stop": ["🎈"]}),
        ("日本語の文章。" * 12, {}),
    ],
)
def test_an_answer_is_the_same_whichever_leg_samples_its_first_token(
    prompt, options, server, complete
):
    options = dict(options)
    prefill, decode = first_tokens(server)
    handed_over = complete(prompt, **options).choices[0]
    assert first_tokens(server) == (prefill + 1, decode)
    body = options.pop("extra_body", {}) | FROM_DECODE
    whole = complete(prompt, extra_body=body, **options).choices[0]
    assert first_tokens(server) == (prefill + 1, decode + 1)
    assert (handed_over.text, handed_over.finish_reason, handed_over.stop_reason) == (
        whole.text,
        whole.finish_reason,
        whole.stop_reason,
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("from_first", "from_second"), [(1, 2), (2, 1), (9, 9)])
def test_a_stop_string_across_the_first_two_tokens(streamed, from_first, from_second, complete):
    full = complete(logprobs=1).choices[0]
    first, second, *_ = full.logprobs.tokens
    stop = first[-from_first:] + second[:from_second]
    for body in ({}, FROM_DECODE):
        answer = complete(stop=[stop], stream=streamed, extra_body=body)
        pieces = list(answer) if streamed else [answer]
        text = "".join(piece.choices[0].text for piece in pieces)
        assert text == full.text[: full.text.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"
        assert pieces[-1].choices[0].stop_reason == stop


def test_streamed_pieces_never_cut_a_character(complete):
    prompt = "🎉🎈🎂" * 10
    pieces = [piece.choices[0].text for piece in complete(prompt, stream=True, max_tokens=15)]
    assert "".join(pieces) == complete(prompt, max_tokens=15).choices[0].text
    # The last one may: the answer ends where max_tokens says.
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.spine
def test_decode_computes_at_most_one_prompt_token_a_request(server, complete):
    # Around one block of 128 tokens, where the last block is full, almost full or just begun.
    lengths = [DEFAULT_SKIP_PREFILL_BELOW_TOKENS + 1, 127, 128, 129, 255, 256, 257, 700]
    computed = "banaserve_prompt_tokens_computed_total"
    prefill, decode = (server.metric(computed, instance_id=i) for i in ("p0", "d0"))
    legs = first_tokens(server)
    prompts = [numbered_tokens(i, length) for i, length in enumerate(lengths)]
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        list(threads.map(lambda prompt: complete(prompt, max_tokens=4), prompts))
        list(
            threads.map(
                lambda prompt: complete(prompt, extra_body=FROM_DECODE, max_tokens=4), prompts[:4]
            )
        )
    assert server.metric(computed, instance_id="p0") >= prefill + sum(lengths)
    assert server.metric(computed, instance_id="d0") <= decode + len(lengths) + 4
    assert first_tokens(server) == (legs[0] + len(lengths), legs[1] + 4)


@pytest.mark.spine
def test_requests_that_share_their_prompt_or_their_id_do_not_disturb_each_other(complete):
    prompt = numbered_tokens(55, 400)
    same = {"stream": True, "max_tokens": 20, "extra_headers": {"X-Request-Id": "the-same"}}

    def ask(pieces: int) -> str:
        with complete(prompt, extra_body={"ignore_eos": True}, **same) as stream:
            taken = [piece.choices[0].text for piece, _ in zip(stream, range(pieces), strict=False)]
        return "".join(taken)

    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        *whole, cut_off = threads.map(ask, [99, 99, 99, 5])
    assert len(set(whole)) == 1
    assert whole[0].startswith(cut_off)
    assert len(whole[0]) > len(cut_off)


def test_a_short_prompt_has_no_prefill_leg(server, complete):
    labels = {"way": "one_leg", "reason": "short_prompt"}
    before = server.metric("banaserve_requests_total", **labels)
    prefilled = server.metric("banaserve_scheduled_requests_total", instance_id="p0")
    assert (
        complete(numbered_tokens(99, DEFAULT_SKIP_PREFILL_BELOW_TOKENS), max_tokens=2)
        .choices[0]
        .text
    )
    assert server.metric("banaserve_requests_total", **labels) == before + 1
    assert server.metric("banaserve_scheduled_requests_total", instance_id="p0") == prefilled


def test_a_prompt_that_fills_the_context(complete):
    answer = complete(numbered_tokens(3, CONTEXT_TOKENS - 2), max_tokens=2)
    assert answer.usage.prompt_tokens == CONTEXT_TOKENS - 2
    assert answer.usage.completion_tokens == 2


# Clients that go away -----------------------------------------------------------------------------


@pytest.mark.spine
def test_a_cancelled_stream_ends_long_before_its_end_and_frees_its_blocks(server, complete, poll):
    def made_tokens() -> float:
        return server.metric("vllm:generation_tokens_total", instance_id="d0")

    for _ in range(3):
        stream = complete(
            numbered_tokens(7, 600), stream=True, max_tokens=400, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(5), stream, strict=False):
            pass
        assert server.metric("vllm:kv_cache_usage_perc", instance_id="d0") > 0
        before = made_tokens()
        stream.close()
        poll(lambda: not busy(server), "all blocks and leases are free")
        assert made_tokens() - before <= CANCELLED_TOKENS


def test_a_client_that_leaves_during_prefill_frees_its_blocks(server, poll):
    # So many that some are left to compute when the client leaves, also on a fast machine.
    prompts = [numbered_tokens(first, 1000) for first in range(200, 232)]
    body = json.dumps({"model": MODEL, "prompt": prompts, "max_tokens": 9})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    decoded = server.metric("banaserve_scheduled_requests_total", instance_id="d0")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        gauges = "vllm:kv_cache_usage_perc", "banaserve_requests_in_flight"
        poll(
            lambda: all(server.metric(name, instance_id="p0") > 0 for name in gauges),
            "a part of the prompts is computed",
        )
    poll(lambda: not busy(server), "all blocks and leases are free")
    decoded = server.metric("banaserve_scheduled_requests_total", instance_id="d0") - decoded
    assert decoded < len(prompts)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [numbered_tokens(1, CONTEXT_TOKENS + 8), "hello " * (CONTEXT_TOKENS + 8)]
)
def test_a_too_long_prompt_names_the_context_length(prompt, complete):
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT_TOKENS}"):
        complete(prompt)


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="`gpt-9` does not exist"):
        client.completions.create(model="gpt-9", prompt=TEXT)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"max_tokens": CONTEXT_TOKENS + 1},
        {"n": 0},
        {"n": 2, "temperature": 0.0},
        {"logprobs": 10_000},
        {"prompt": ""},
        {"prompt": [10**9] * 40},
        {"logit_bias": {"999999": 1}},
        {"stop": [""]},
        {"extra_body": {"stop_token_ids": [10**9]}},
        {"extra_body": {"allowed_token_ids": []}},
        {"extra_body": {"min_tokens": 50}},
        {"extra_body": {"structured_outputs": {"regex": "("}}},
        {"extra_body": {"structured_outputs": {"json": {"type": "nothing"}}}},
        {"extra_body": {"vllm_xargs": {"banaserve_output": [10**9]}}},
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense(options, server, complete):
    with pytest.raises(openai.BadRequestError):
        complete(**options)
    assert server.get("/ready").json()["ready"]
    assert server.metric("banaserve_instance_restarts_total") == 0


def test_what_only_one_engine_can_do_is_refused_in_words(server):
    answer = server.post("/scale_elastic_ep", {"new_data_parallel_size": 2})
    assert answer.status_code == 501
    assert "banaserve scale" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b'{"model":', b"[]", b"\xff\xfe", b""])
def test_bad_json(body, server):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large(announced, server):
    pieces = [b"x" * 2**16] * 20
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=b"".join(pieces) if announced else iter(pieces),
        headers={"Content-Type": "application/json"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 413
    assert "--max-body-size" in answer.json()["error"]["message"]


def test_too_many_requests_at_once(server, complete, poll):
    endless = {"stream": True, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    streams = [complete(**endless) for _ in range(MAX_CONCURRENT)]
    with pytest.raises(openai.RateLimitError) as refused:
        complete()
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    assert server.get("/health").status_code == 200
    for stream in streams:
        stream.close()
    poll(lambda: not busy(server), "the streams have ended")
    assert complete().choices[0].text


def test_the_trace_of_a_request_shows_both_legs_in_order(
    server, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = server.client().completions.create(
        model=MODEL,
        prompt=[90 + i for i in range(DEFAULT_SKIP_PREFILL_BELOW_TOKENS + 300)],
        max_tokens=4,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": "traced-by-hand"},
    )
    (answer_id,) = {piece.id for piece in stream}
    where = ("--run-dir", str(server.run_dir))
    assert main(["trace", answer_id, *where]) == 0
    parts, shown = capsys.readouterr().out.split("\n\n")
    for words in ("receive", "queue", "prefill", "hand-over", "decode", "respond"):
        assert any(line.strip().startswith(words) for line in parts.splitlines()), (words, parts)
    times_ms = [float(line.split()[0]) for line in shown.splitlines()[1:]]
    assert times_ms == sorted(times_ms)
    wanted = {
        "front door": [
            "routed to p0 then d0",
            "prefill leg sent to p0",
            "prefill leg ended on p0: length",
            "first token of the answer, from prefill",
            "decode leg sent to d0",
            "decode leg ended on d0: length",
            "request ended: length, 4 output tokens",
        ],
        "p0": ["scheduler has it", "store asked", "prompt: ", "saved to the store"],
        "d0": ["hand-over: ", "store asked", "fetched in", "decode: ", "lets it go: 3 output"],
    }
    for process, in_order in wanted.items():
        lines = iter(shown.splitlines()[1:])
        for words in in_order:
            assert any(f" {process} " in line and words in line for line in lines), (words, shown)
    assert shown.index("prompt: ") < shown.index("prefill leg ended") < shown.index("hand-over: ")
    assert "not saved" not in shown
    assert "not known" not in shown
    assert main(["trace", "traced-by", "--json", *where]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=RequestTrace)
    assert found.summary.id.startswith(answer_id)
    assert (found.summary.instances, found.summary.output_tokens) == (["p0", "d0"], 4)
    assert main(["trace", *where]) == 0
    assert answer_id in capsys.readouterr().out
    assert main(["trace", "never-sent", *where]) == 2
    assert capsys.readouterr().err == "banaserve: there is no request never-sent\n"


def test_the_trace_says_why_decode_samples_the_first_token(
    server, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt=list(range(300, 700)), max_tokens=2, extra_body=FROM_DECODE
    )
    assert main(["trace", answer.id, "--run-dir", str(server.run_dir)]) == 0
    shown = capsys.readouterr().out
    assert (
        "first token of the answer, from decode; prefill's could not be used: extra_args" in shown
    )
    assert shown.count("hand-over") + shown.count("scheduler has it") >= 3, shown
    assert "not known" not in shown
