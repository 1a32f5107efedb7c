"""Grammars of several backends in one engine core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import sampling_params
from vllm.v1 import structured_output
from vllm.v1.structured_output.request import StructuredOutputRequest

from banaserve.engine.compat.engine import BackendsByRequest


class Backend:
    """A backend whose grammars remember it."""

    def __init__(self, config: Any, tokenizer: Any, vocab_size: int) -> None:
        pass

    def compile_grammar(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            by=self, is_terminated=lambda: False, fill_bitmask=lambda mask, row: mask[row].fill_(1)
        )

    def allocate_token_bitmask(self, num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, 1, dtype=torch.int32)

    def destroy(self) -> None:
        pass


@pytest.fixture
def manager():
    model = SimpleNamespace(skip_tokenizer_init=True, get_vocab_size=lambda: 32, is_diffusion=False)
    made = BackendsByRequest(
        SimpleNamespace(
            model_config=model,
            # Grammars are compiled at once, not on a thread.
            parallel_config=SimpleNamespace(distributed_executor_backend="external_launcher"),
            scheduler_config=SimpleNamespace(max_num_seqs=2),
            structured_outputs_config=SimpleNamespace(enable_in_reasoning=True),
            num_speculative_tokens=0,
        )
    )
    made.tokenizer = None
    return made


def asked(backend: str) -> Any:
    params = sampling_params.StructuredOutputsParams(choice=["a"])
    params._backend = backend
    return SimpleNamespace(
        request_id=backend,
        structured_output_request=StructuredOutputRequest(params=params),
        sampling_params=SimpleNamespace(structured_outputs=params, all_stop_token_ids=set()),
    )


def test_each_grammar_is_compiled_with_the_backend_of_its_request(manager, monkeypatch):
    kinds = {"xgrammar": type("X", (Backend,), {}), "guidance": type("G", (Backend,), {})}
    monkeypatch.setattr(structured_output, "XgrammarBackend", kinds["xgrammar"])
    monkeypatch.setattr(structured_output, "GuidanceBackend", kinds["guidance"])
    made = {}
    for name in ("xgrammar", "guidance", "xgrammar", "guidance"):
        request = asked(name)
        manager.grammar_init(request)
        backend = request.structured_output_request.grammar.by
        assert type(backend) is kinds[name]
        assert made.setdefault(name, backend) is backend, "a backend is made once"


def test_a_step_makes_masks_while_another_backend_is_being_made(manager, monkeypatch):
    first, masks = asked("xgrammar"), []

    class Slow(Backend):
        def __init__(self, *_: Any, **__: Any) -> None:
            # What the scheduler's thread does meanwhile.
            masks.append(manager.grammar_bitmask({"xgrammar": first}, ["xgrammar"], {}))

    monkeypatch.setattr(structured_output, "XgrammarBackend", Backend)
    monkeypatch.setattr(structured_output, "GuidanceBackend", Slow)
    manager.grammar_init(first)
    manager.grammar_init(asked("guidance"))
    assert [mask.tolist() for mask in masks] == [[[1]]]


def test_a_backend_that_cannot_be_made_leaves_the_others(manager, monkeypatch):
    class Broken(Backend):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise ValueError("no such tokenizer")

    monkeypatch.setattr(structured_output, "XgrammarBackend", Backend)
    monkeypatch.setattr(structured_output, "GuidanceBackend", Broken)
    first = asked("xgrammar")
    manager.grammar_init(first)
    with pytest.raises(ValueError, match="no such tokenizer"):
        manager.grammar_init(asked("guidance"))
    assert manager.grammar_bitmask({"xgrammar": first}, ["xgrammar"], {}).tolist() == [[1]]
