"""What ``banaserve doctor`` concludes of other machines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from banaserve.cli.doctor.checks import CheckStatus
from banaserve.cli.doctor.nodes import check_link, check_node
from banaserve.nodes.measuring import LinkReport, NodeReport
from banaserve.nodes.messages import Inspected, LinkMeasured

OK, WARNING, FAILED = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.FAILED
HAS = Inspected("banaserve 1, vLLM 2", "3.11.7", ("0", "1"), 8 << 30, 16, 0.0)


def node(ahead_s: float = 0.0, **changed: Any) -> NodeReport:
    return NodeReport("a:1", msgspec.structs.replace(HAS, **changed), ahead_s)


@pytest.mark.parametrize(
    ("report", "status", "words"),
    [
        (node(), OK, "2 GPUs, 16 cores, 8 GiB available; banaserve 1, vLLM 2"),
        (node(gpus=()), OK, "16 cores, 8 GiB available; banaserve 1, vLLM 2"),
        (node(version="banaserve 0"), FAILED, "banaserve 0, here banaserve 1, vLLM 2"),
        (node(model_problem="/m: no such folder"), FAILED, "/m: no such folder"),
        (node(server="s"), FAILED, "it is in use"),
        (node(python="3.11.9"), OK, "vLLM 2"),
        (node(python="3.12.1"), WARNING, "Python 3.12.1"),
        (node(ahead_s=-2.0), WARNING, "its clock is -2.0 s off"),
        (NodeReport("a:1", None, problem="Connection refused"), FAILED, "Connection refused"),
    ],
)
def test_a_node(report: NodeReport, status: CheckStatus, words: str) -> None:
    finding = check_node(report, HAS.version, HAS.python)
    assert (finding.name, finding.status) == ("node a:1", status)
    assert words in finding.detail
    assert (finding.advice == "") == (status is OK or bool(report.found and "/m" in words))


@pytest.mark.parametrize(
    ("problem", "detail"),
    [("node a:1: Connection refused", "Connection refused"), ("node a:1 is gone", "is gone")],
)
def test_the_name_of_a_node_is_said_once(problem: str, detail: str) -> None:
    finding = check_node(NodeReport("a:1", None, problem=problem), HAS.version, HAS.python)
    assert (finding.name, finding.detail) == ("node a:1", detail)


@pytest.mark.parametrize(
    ("measured", "status", "words"),
    [
        (LinkMeasured(2e-4, 1.25e9), OK, "0.20 ms there and back, 10.0 Gbit/s"),
        (LinkMeasured(8e-3, 1.25e9), WARNING, "8.00 ms"),
        (LinkMeasured(2e-4, 1e7), WARNING, "0.1 Gbit/s"),
        (LinkMeasured(problem="it does not answer"), FAILED, "it does not answer"),
    ],
)
def test_a_link(measured: LinkMeasured, status: CheckStatus, words: str) -> None:
    finding = check_link(LinkReport("a", "b", measured))
    assert (finding.name, finding.status) == ("a to b", status)
    assert words in finding.detail
    assert (finding.advice == "") == (status is OK)
