"""Options that are declared as fields of a dataclass: what a command line sets, and help says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from banaserve.base.arguments import (
    ABOVE_0,
    NOT_NEGATIVE,
    Formatter,
    Options,
    Parser,
    argument,
    check_rules,
    derived,
    extra,
    option,
    options_of,
    pairs,
    values_of,
)
from banaserve.base.errors import UserError


@dataclass(frozen=True)
class Inner:
    depth: int = option("depth of the search", 2, rule=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Example:
    word: str = argument("word to look for")
    others: tuple[str, ...] = argument("further words", ())
    must: int = option("number that must be given", kind=int)
    wait_s: float = option("time to wait", 1.5, rule=ABOVE_0, group="times")
    step_tokens: int = option("most tokens of a step", 8)
    path: Path | None = option("file to read", None, Path, metavar="FILE")
    quick: bool = option("hurry", False)
    ui: bool = option("serve no page", True, name="--no-ui")
    moves: bool = option("move or stay (--moves)", True)
    saves: bool = option("who saves", True, choices=("on", "off"))
    names: tuple[str, ...] = option("names, repeated", (), name="--name")
    kind: str = option("one of {names} (usual)", "usual", decided=True)
    facts: Options = pairs("facts, repeated", name="--fact")
    total: int = derived(0, lambda known: known.left + known.right, extra("--left", "the left", 0))
    right: int = option("the right", 0)
    inner: Inner = derived(
        Inner(), lambda known: Inner(**values_of(Inner, known)), *options_of(Inner)
    )


def parser() -> Parser:
    made = Parser(prog="banaserve example", formatter_class=Formatter, allow_abbrev=False)
    made.add_options(Example, {"--kind": ("plain", "usual")})
    return made


def parsed(line: str) -> Example:
    made = Example(**values_of(Example, parser().parse_args(line.split())))
    check_rules(made)
    check_rules(made.inner)
    return made


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {"word": "w", "others": (), "must": 1, "wait_s": 1.5, "ui": True, "kind": "usual"}),
        ("a b --must 2", {"others": ("a", "b"), "must": 2}),
        ("--wait 3 --step-tokens 9 --path f", {"wait_s": 3.0, "step_tokens": 9, "path": Path("f")}),
        ("--quick --no-ui --no-moves", {"quick": True, "ui": False, "moves": False}),
        ("--moves --saves off", {"moves": True, "saves": False}),
        ("--saves on --name a --name b", {"saves": True, "names": ("a", "b")}),
        (
            "--kind plain --fact a-b=1 --fact c=x",
            {"kind": "plain", "facts": (("a_b", 1), ("c", "x"))},
        ),
        ("--left 2 --right 3 --depth 4", {"total": 5, "right": 3, "inner": Inner(4)}),
    ],
)
def test_a_line_sets_the_fields(line: str, values: dict[str, Any]) -> None:
    made = parsed(f"w {line}" if "--must" in line else f"w {line} --must 1")
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("w", "the following arguments are required: --must"),
        ("w --must x", "argument --must: invalid int value: 'x'"),
        ("w --must 1 --wait 0", "--wait 0: must be more than 0"),
        ("w --must 1 --wait nan", "--wait nan: must be more than 0"),
        ("w --must 1 --depth -1", "--depth -1: must not be negative"),
        ("w --must 1 --quik", "unrecognized arguments: --quik; did you mean --quick?"),
        ("w --must 1 --saves no", "argument --saves: invalid choice: 'no'"),
        ("w --must 1 --fact x", "--fact x: write KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line(line: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        parsed(line)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_help_says_unit_default_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = " ".join(parser().format_help().split())
    for words in (
        "--must N number that must be given (required)",
        "times: --wait SECONDS time to wait (1.5)",
        "--step-tokens TOKENS most tokens of a step (8)",
        "--path FILE file to read",
        "--saves {on,off} who saves (on)",
        "--kind KIND one of plain, usual (usual)",
        "--depth N depth of the search (2)",
    ):
        assert words in page
