"""The coverage-guided fuzzer: its targets, what it reports, and what it has once found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import guided
from guided import FOLDER, FOUND, TARGETS, Outcome, check_of, keep, main, read_outcome

WHOLE = """\
INFO: seed corpus: files: 3 min: 4b max: 80b total: 120b rss: 50Mb
#4\tINITED cov: 31 ft: 31 corp: 2/84b exec/s: 0 rss: 51Mb
#900\tNEW    cov: 46 ft: 70 corp: 9/1Kb lim: 128 exec/s: 450 rss: 52Mb L: 12/80 MS: 1 EraseBytes-
Done 1000 runs in 2 second(s)
stat::number_of_executed_units: 1000
"""
CRASHED = """\
#4\tINITED cov: 31 ft: 31 corp: 2/84b exec/s: 0 rss: 51Mb
 === Uncaught Python exception: ===
AssertionError: it hangs
artifact_prefix='build/x.'; Test unit written to build/x.crash-1f
"""


@pytest.mark.parametrize(
    ("log", "outcome"),
    [
        (WHOLE, Outcome(1000, 46, None, True)),
        (CRASHED, Outcome(0, 31, Path("build/x.crash-1f"), True)),
        ("ModuleNotFoundError: No module named 'atheris'\n", Outcome(0, 0, None, False)),
    ],
)
def test_a_log_is_read(log: str, outcome: Outcome) -> None:
    assert read_outcome(log) == outcome


def test_a_finding_goes_to_the_corpus_once(tmp_path: Path) -> None:
    places = set()
    for name in ("first", "second"):
        artifact = tmp_path / name
        artifact.write_bytes(b"what breaks it")
        places.add(keep(artifact, tmp_path))
        assert not artifact.exists()
    assert [place.read_bytes() for place in places] == [b"what breaks it"]
    assert next(iter(places)).name.startswith(FOUND)


def test_an_unknown_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["framin"])
    assert "no target framin: there are framing, bodies" in capsys.readouterr().err


def _files() -> list[tuple[str, Path]]:
    return [
        (name, path)
        for name, target in TARGETS.items()
        for path in sorted((FOLDER / "corpus" / target.corpus).iterdir())
    ]


@pytest.mark.parametrize(
    ("name", "path"), _files(), ids=lambda one: one.name if isinstance(one, Path) else one
)
def test_what_is_kept_has_the_property(name: str, path: Path) -> None:
    """A strategy draws from the corpus; this leaves out none of it."""
    check_of(TARGETS[name])(path.read_bytes())


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="pip install atheris: `make fuzz` does"
)
def test_a_planted_defect_is_found(tmp_path: Path) -> None:
    """Behind three comparisons, which a fuzzer that does not see coverage passes too rarely."""
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "__init__.py").touch()
    (planted / "parser.py").write_text(
        "def parse(data):\n"
        "    if data[:1] == b'B':\n"
        "        if data[1:2] == b'a':\n"
        "            if data[2:3] == b'n':\n"
        "                raise KeyError('planted')\n"
    )
    code = (
        "import sys, atheris\n"
        "with atheris.instrument_imports(include=['planted']):\n"
        "    from planted.parser import parse\n"
        "atheris.Setup([sys.argv[0], *sys.argv[1:]], parse)\n"
        "atheris.Fuzz()\n"
    )
    options = ["-runs=2000000", "-seed=1", "-timeout=0", f"-artifact_prefix={tmp_path}/"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        errors="replace",
    )
    outcome = read_outcome(done.stderr + done.stdout)
    assert outcome.artifact is not None, done.stderr
    assert outcome.artifact.read_bytes()[:3] == b"Ban"
    assert guided.keep(outcome.artifact, tmp_path).exists()
