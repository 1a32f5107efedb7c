"""Help of ``banaserve serve``: a screen of common options, and a page for each option group."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from banaserve.base.arguments import Parser
from banaserve.base.names import check_known

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


class ServeParser(Parser):
    """A parser whose help is a screen of common options."""

    def format_help(self) -> str:
        """Return the screen of common options."""
        every = [action for group in self.groups.values() for action in group]
        by_name = {name: one for one in every for name in one.option_strings}
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

    def _page(self, sections: Mapping[str, Sequence[argparse.Action]], end: str) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(end)
        return formatter.format_help()
