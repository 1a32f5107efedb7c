"""``banaserve completion SHELL``: a script that lets a shell complete banaserve's command lines.

The script calls ``banaserve completion --complete WORDS`` at each completion, so that it knows the
options of the installed version. Without candidates, shells offer files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from banaserve.base.errors import UserError
from banaserve.cli.app import App
from banaserve.cli.commands import known

_ASK = "banaserve completion --complete"
SCRIPTS = {
    "bash": f"""_banaserve() {{
    local IFS=$'\\n'
    COMPREPLY=($({_ASK} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _banaserve banaserve""",
    "zsh": f"""#compdef banaserve
_banaserve() {{
    local -a found
    found=(${{(f)"$({_ASK} "${{(@)words[2,CURRENT]}}" 2>/dev/null)"}})
    if (( $#found )); then compadd -- $found; else _files; fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _banaserve banaserve""",
    "fish": f"""complete -c banaserve -a \
'({_ASK} (commandline -opc)[2..-1] "$(commandline -ct)" 2>/dev/null)'""",
}
_SHELLS = ", ".join(SCRIPTS)
_HELP = f"""usage: banaserve completion SHELL

Print a script that lets SHELL ({_SHELLS}) complete banaserve's commands and options:

  bash   echo 'source <(banaserve completion bash)' >> ~/.bashrc
  zsh    echo 'source <(banaserve completion zsh)' >> ~/.zshrc
  fish   banaserve completion fish > ~/.config/fish/completions/banaserve.fish"""


def completion_command(argv: Sequence[str]) -> int:
    """Print a shell's script, or candidates for a completion; return the exit code.

    Raises:
        UserError: There is no script for this shell.
    """
    if argv[:1] == ["--complete"]:
        print("\n".join(candidates(argv[1:])))
        return 0
    if argv in (["--help"], ["-h"]):
        print(_HELP)
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        raise UserError(f"completion: name one shell of {_SHELLS} (see banaserve completion -h)")
    print(SCRIPTS[argv[0]])
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of ``words``.

    Args:
        words: Words after ``banaserve``; the last one, which may be empty, is to be completed.
    """
    *before, begun = words or [""]
    commands, options = _words_after(before)
    action = options.get(before[-1]) if before else None
    if action is not None and action.nargs != 0:
        values = [str(one) for one in action.choices or ()]
    else:
        values = [*(options if begun.startswith("-") else commands)]
    return [value for value in values if value.startswith(begun)]


def _words_after(words: Sequence[str]) -> tuple[Iterable[str], Mapping[str, argparse.Action]]:
    """Return the sub-commands, and the options by name, that may follow ``words``."""
    commands = known()
    if not words:
        return [*commands, "--help", "--version"], {}
    name, *rest = words
    if name not in commands:
        return (), {}
    if name == "completion":
        return SCRIPTS, {}
    command = commands[name]
    module = import_module(command.module)
    if subcommands := getattr(module, "SUBCOMMANDS", None):
        if not (rest and rest[0] in subcommands):
            return subcommands, {}
        module = import_module(subcommands[rest[0]].module)
    target = command.load()
    if isinstance(target, App):
        word = rest[0] if rest and rest[0] in target.commands else ""
        parser = target.parser(f"banaserve {name}", word)
        return () if word else target.commands, parser.options()
    return (), module.make_parser().options() if hasattr(module, "make_parser") else {}
