"""Command line of ``banaserve serve`` as a ``ServeConfig``."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from banaserve.base.arguments import Formatter, Parser, values_of
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.move_policies import registry as migration_policies
from banaserve.orchestrator.control.routing import registry as routing_policies
from banaserve.transport import registry as transports

_LIKENESS = 0.83
"""Least likeness of a misspelt option to one of ours: that of ``--prot`` to ``--port``."""
_VLLMS = frozenset(
    (
        "--decode-context-parallel-size",
        "--device-ids",
        "--nnodes",
        "--prefill-context-parallel-size",
        "--scheduler-cls",
    )
)
"""Options of vLLM that resemble ours as much."""


def parse_serve_argv(argv: Sequence[str]) -> ServeConfig:
    """Parse the words after ``banaserve serve``.

    Options that are not banaserve's own are passed to vLLM, which checks them.

    Raises:
        UserError: An option or a value is not valid.
        SystemExit: Help was asked for and has been printed.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    ours, for_vllm = list(argv[:end]), argv[end + 1 :]  # what follows -- goes to vLLM unchanged
    parser = make_parser()
    for word in ours:
        if word.startswith("--help="):
            print(parser.format_group(word.partition("=")[2]), end="")
            raise SystemExit(0)
    # The model as vLLM's positional argument. Only the first word can be the model: a later word
    # may be the value of an option that only vLLM knows.
    positional = ours.pop(0) if ours and not ours[0].startswith("-") else None
    known, unknown = parser.parse_known_args(ours)
    if known.config is not None:
        ours = [*_options_from_file(known.config, parser), *ours]
        known, unknown = parser.parse_known_args(ours)
    if known.model and positional and known.model != positional:
        raise UserError(f"two models: {positional} and --model {known.model}")
    known.model = known.model or positional
    _check_instances(known)
    _catch_misspelt(parser, unknown)
    return ServeConfig(**values_of(ServeConfig, known), vllm_argv=(*unknown, *for_vllm))


def _check_instances(known: argparse.Namespace) -> None:
    given = [name for name in ("pd", "colocated", "instances") if getattr(known, name)]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} exclude each other")
    if known.elastic and known.mode not in (None, "on"):
        raise UserError(f"--elastic and --orchestrator {known.mode} exclude each other")
    if (known.elastic or known.instances) and not known.kv_store:
        raise UserError("--no-kv-store: instances that change their roles need the store")
    if known.elastic and known.policy not in (None, "elastic"):
        raise UserError(f"--elastic and --orchestrator-policy {known.policy} exclude each other")


def _catch_misspelt(parser: ServeParser, unknown: Sequence[str]) -> None:
    """Refuse an unknown option that resembles one of ours: vLLM would only after it has loaded."""
    for word in unknown:
        given = word.partition("=")[0]  # what follows may be a key
        name = given.replace("_", "-")
        if not name.startswith("--") or name in _VLLMS:
            continue
        # An option of ours for one role ends like an option of vLLM, which remains vLLM's.
        likely = [own for own in parser.options() if own == name or not own.endswith(name[1:])]
        if near := difflib.get_close_matches(name, likely, 1, _LIKENESS):
            raise UserError(f"unknown option {given}; did you mean {near[0]}?")


def make_parser() -> ServeParser:
    """Return the parser of banaserve's own options."""
    parser = ServeParser(
        prog="banaserve serve",
        usage="banaserve serve [MODEL] [options] [-- vLLM options]",
        description="Serve a model with prefill and decode apart, over the OpenAI API.",
        epilog="Every other option, and everything after --, goes to vLLM unchanged: "
        "banaserve serve --model smollm2-135m --pd 2:2 -- --max-model-len 4096",
        allow_abbrev=False,
        formatter_class=Formatter,
        add_help=False,
    )
    parser.groups["instances"] = [
        parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    ]
    parser.add_options(
        ServeConfig,
        {
            "--migration-transport": transports.names(),
            "--orchestrator-policy": migration_policies.names(),
            "--routing-policy": routing_policies.names(),
        },
    )
    return parser


def _options_from_file(path: Path, parser: ServeParser) -> list[str]:
    """Return the entries of a TOML file as command-line options: its keys are option names.

    ``x = false`` leaves out a flag of banaserve; for vLLM, whose options the parser does not know,
    it becomes ``--no-x``.

    Raises:
        UserError: The file cannot be read, or a value has a type that no option takes.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # ValueError: invalid TOML, or a file that is not text
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--config {path}: {why}") from error
    argv: list[str] = []
    for key, value in table.items():
        option = f"--{key.replace('_', '-')}"
        own = parser.options().get(option)
        if isinstance(value, bool):
            if own is not None and own.nargs != 0:
                raise UserError(f"--config {path}: {key} takes a value, see banaserve serve --help")
            if value or own is None:
                argv.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (str, int, float)):
            argv += [option, str(value)]
        elif isinstance(value, list) and not any(isinstance(one, (list, dict)) for one in value):
            argv += [word for item in value for word in (option, str(item))]
        else:
            raise UserError(f"--config {path}: {key} is neither a value nor a list of values")
    return argv


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
