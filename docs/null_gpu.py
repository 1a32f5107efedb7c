"""Page of what a GPU that computes nothing has shown: ``docs/null-gpu.md`` from ``null-gpu.json``.

make test-nullgpu               # runs the tests, which write the file, then writes the page
python -m docs.null_gpu         # writes the page
python -m docs.null_gpu --check # a line if the page is not that of the file
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from docs.repository.findings import ROOT

RECORD = ROOT / "docs" / "null-gpu.json"
PAGE = ROOT / "docs" / "null-gpu.md"
KINDS = ("hand-over", "layers", "heads", "context", "experts")
_NAMES = {"context": "older blocks"}
_AT_RANKS = {"heads": "refused: a head is on one rank"}
"""Cells of what does not work with several ranks."""
_AT_RUNNER_1 = {"context": "not shown: torch's kernels compute the positions"}
"""Cells of what the first model runner does not show."""
_AT_GRAPHS = {"experts": "not shown: torch's kernels count the tokens"}
"""Cells of what does not work with CUDA graphs."""


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one test has shown to work.

    Attributes:
        kind: One of ``KINDS``.
        runner: Model runner of vLLM, 1 or 2.
        ranks: Tensor-parallel ranks of each instance.
    """

    kind: str
    graphs: bool
    runner: int
    ranks: int
    vllm: str


def main(argv: Sequence[str]) -> int:
    """Write the page, or say that it is stale with ``--check``; return the exit code."""
    rows = msgspec.json.decode(RECORD.read_bytes(), type=list[Shown])
    if list(argv) != ["--check"]:
        PAGE.write_text(page(rows))
        print(PAGE.relative_to(ROOT))
        return 0
    if PAGE.read_text() != page(rows):
        print(f"{PAGE.name} is not that of {RECORD.name}: run python -m docs.null_gpu")
        return 1
    return 0


def page(rows: Sequence[Shown]) -> str:
    setups = sorted({(row.vllm, row.runner, row.ranks, row.graphs) for row in rows})
    lines = [
        "# CUDA's path on a GPU that computes nothing",
        "",
        "Generated from [null-gpu.json](null-gpu.json), which `make test-nullgpu` writes; do not "
        "edit. The GPU is a CUDA runtime",
        "whose memory is memory of the host and whose kernels do nothing, so `works` means that "
        "`--pd 1:1 --migration on` starts with",
        "vLLM's CUDA build, and that modules leave and come home under streams of which none is "
        "cut short. It says nothing about",
        "tokens, speed or memory.",
        "",
        "| vLLM | Model runner | Tensor parallel | CUDA graphs | "
        f"{' | '.join(_NAMES.get(kind, kind) for kind in KINDS)} |",
        f"|{' --- |' * (4 + len(KINDS))}",
    ]
    for vllm, runner, ranks, graphs in setups:
        works = {kind: Shown(kind, graphs, runner, ranks, vllm) in rows for kind in KINDS}
        cells = [
            "works" if works[kind] else _missing(kind, runner, ranks, graphs) for kind in KINDS
        ]
        how = "yes" if graphs else "no"
        lines.append(f"| {vllm} | {runner} | {ranks} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _missing(kind: str, runner: int, ranks: int, graphs: bool) -> str:
    known = _AT_RUNNER_1 if runner == 1 else {}
    known = known | (_AT_RANKS if ranks > 1 else {}) | (_AT_GRAPHS if graphs else {})
    return known.get(kind, "not run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
