"""A guest is a pipeline stage of any layers, and of others the next time."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")


def test_what_a_stage_lacks_is_not_told_by_where_an_earlier_one_lay() -> None:
    """vLLM remembers it by the address of a model: here the same one has other layers."""
    from torch import nn
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    from banaserve.engine.compat.runner.model import PPMissingLayer, pipeline_stage

    model = nn.ModuleList([PPMissingLayer(), nn.Linear(1, 1)])
    with pipeline_stage(1, 2):
        assert is_pp_missing_parameter("0.weight", model)
        assert not is_pp_missing_parameter("1.weight", model)
    model[0], model[1] = model[1], model[0]
    with pipeline_stage(0, 1):
        assert not is_pp_missing_parameter("0.weight", model)
        assert is_pp_missing_parameter("1.weight", model)
