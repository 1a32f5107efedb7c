"""Parsers of tools and reasoning that do not fit the model's tokenizer: one line, and no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from fork_server import ForkServer
from mock_facts import MockOptions
from mock_run import mock_run
from observing import until

pytestmark = pytest.mark.deep


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--reasoning-parser", "deepseek_r1"), "--reasoning-parser deepseek_r1 does not fit"),
        (
            ("--enable-auto-tool-choice", "--tool-call-parser", "mistral"),
            "--tool-call-parser mistral cannot be used with the tokenizer of",
        ),
    ],
)
def test_a_parser_that_does_not_fit_is_one_line(
    tmp_path: Path, fork_server: ForkServer, options: tuple[str, ...], named: str
) -> None:
    run = mock_run(tmp_path, fork_server, "--pd", "1:1", *options, mocks=MockOptions())
    try:
        until(lambda: run.process.poll() is not None, "serve ends", 120.0)
        assert run.process.returncode == 2
        said = run.errors.read_text()
        assert "Traceback" not in said
        assert said.strip().splitlines()[-1].startswith(f"banaserve: {named}")
    finally:
        run.close()
