"""Help of ``banaserve serve``: a screen of common options, and a page for each option group."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence

from banaserve.arguments import Parser
from banaserve.names import check_known

COMMON: Mapping[str, Sequence[str]] = {
    "model and instances": (
        "--model",
        "--pd",
        "--instances",
        "--colocated",
        "--devices",
        "--node",
    ),
    "server": ("--host", "--port", "--api-key"),
    "KV cache store": ("--kv-store-size", "--kv-store-ssd", "--kv-store-distributed"),
    "limits of service and orchestration": ("--slo-ttft", "--slo-tpot", "--orchestrator"),
}
"""Options that most users need, by the title of their section."""
ALL = "all"
_MAX_WIDTH = 100
_OPTION_WIDTH = 34


class _WithDefaults(argparse.HelpFormatter):
    """Formatter that adds an option's default in brackets, unless its help ends with brackets."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words, default = action.help or "", action.default
        is_said = words.endswith(")")
        # A flag's default says nothing; a zero or empty default has a special meaning.
        if is_said or not default or isinstance(default, bool) or default == argparse.SUPPRESS:
            return words
        return f"{words} ({default:g})" if isinstance(default, float) else f"{words} ({default})"


class ServeParser(Parser):
    """A parser whose options are in named groups.

    Attributes:
        groups: Options of each group, in the order of their definition.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.groups: dict[str, list[argparse.Action]] = {}

    def end_group(self, name: str) -> None:
        """Put all options that are not in a group yet into the group ``name``."""
        grouped = {id(action) for group in self.groups.values() for action in group}
        parser = self
        self.groups[name] = [one for one in parser._actions if id(one) not in grouped]

    def format_help(self) -> str:
        """Return the screen of common options."""
        by_name = {name: one for one in self._every() for name in one.option_strings}
        sections = {title: [by_name[name] for name in names] for title, names in COMMON.items()}
        more = ", ".join(self.groups)
        return self._page(
            sections,
            f"--help=GROUP shows the options of a group ({more}), --help={ALL} shows every option. "
            "Options that banaserve does not have, and everything after --, go to vLLM.",
        )

    def format_group(self, name: str) -> str:
        """Return the options of a group, or of all.

        Raises:
            UserError: There is no such group.
        """
        check_known("group of options", name, [ALL, *self.groups])
        groups = self.groups if name == ALL else {name: self.groups[name]}
        return self._page(groups, self.epilog or "")

    def _every(self) -> list[argparse.Action]:
        return [action for group in self.groups.values() for action in group]

    def _page(self, sections: Mapping[str, Sequence[argparse.Action]], end: str) -> str:
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns) - 2
        formatter = _WithDefaults(
            self.prog, max_help_position=min(_OPTION_WIDTH, width // 3), width=width
        )
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(end)
        return formatter.format_help()


def asked_group(words: Sequence[str]) -> str | None:
    """Return the group that ``--help=GROUP`` among the words names; None if there is none."""
    for word in words:
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None
