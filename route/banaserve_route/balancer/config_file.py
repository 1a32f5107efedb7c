"""Settings from a TOML or YAML file, read again when it changes; errors name the key."""

from __future__ import annotations

import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml

from banaserve.base.errors import UserError
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    HedgeSettings,
    LimitSettings,
    PeerSettings,
    PolicySettings,
    ReplicaSettings,
    ShadowSettings,
    TenantSettings,
)
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.targets.health import run_periodically

_MAX_BYTES = 4 * 1024 * 1024
_LOOK_S = 0.5
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "$": BalancerSettings,
    "$.policy": PolicySettings,
    "$.policy.shadow": ShadowSettings,
    "$.limits": LimitSettings,
    "$.health": HealthSettings,
    "$.hedge": HedgeSettings,
    "$.replicas[...]": ReplicaSettings,
    "$.peers[...]": PeerSettings,
    "$.tenants[...]": TenantSettings,
}
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `([^`]*)`)?")
_NUMBER = re.compile(r"\[\d+\]")
_AT = re.compile(r"(.*) - at `\$\.?(.*)`")


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses a duplicate key, which YAML's own loader overwrites silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is no word")
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} is there twice")
            seen.add(key)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def read_settings(path: Path) -> BalancerSettings:
    """Return the settings in the file ``path``, which is TOML or YAML according to its suffix.

    Raises:
        UserError: The file cannot be read, or a value is invalid; the message names file and key.
    """
    table = _read(path)
    try:
        settings = msgspec.convert(table, BalancerSettings)
        settings.check()
        if not settings.replicas and not settings.peers:
            raise UserError("no replica: give replicas, each with its url")
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_explain(str(error))}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return settings


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path} is larger than {_MAX_BYTES} bytes")
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            return yaml.load(text, _Loader)
        if path.suffix != ".toml":
            raise UserError(f"{path}: write TOML to a .toml file or YAML to a .yaml file")
        return tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: it quotes the line, which may hold a key.
        words, at = ", ".join(filter(None, (error.context, error.problem))), error.problem_mark
        where = f" (at line {at.line + 1}, column {at.column + 1})" if at else ""
        raise UserError(f"{path}: {words}{where}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None


def _explain(message: str) -> str:
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is None:
        placed = _AT.fullmatch(message)
        return f"{placed[2]}: {placed[1]}" if placed else message
    key, place = unknown[1], unknown[2] or "$"
    section = _SECTIONS.get(_NUMBER.sub("[...]", place))
    known = section.__struct_fields__ if section is not None else ()
    near = get_close_matches(key, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near else ""
    where = place.removeprefix("$").removeprefix(".")
    return f"unknown key {where}{'.' if where else ''}{key}{hint}"


async def follow(path: Path, balancer: Balancer, discovery: Discovery) -> None:
    """Read ``path`` again whenever it changes; a file with a mistake changes nothing."""
    look = _File(path, balancer, discovery).look
    await run_periodically(look, _LOOK_S, balancer.log, f"reading {path} again")


class _File:
    def __init__(self, path: Path, balancer: Balancer, discovery: Discovery) -> None:
        self._path, self._balancer, self._discovery = path, balancer, discovery
        self._seen = self._before = _stamp(path)

    async def look(self) -> None:
        stamp = _stamp(self._path)
        is_settled, self._before = stamp == self._before, stamp
        # Wait until the file no longer changes: half a file may be a valid one.
        if stamp == self._seen or stamp is None or not is_settled:
            return
        self._seen = stamp
        balancer = self._balancer
        try:
            await self._discovery.take(read_settings(self._path), balancer)
        except UserError as error:
            balancer.log(f"{error}; going on as before")
        else:
            balancer.log(f"{self._path} has been read again: {len(balancer.targets)} targets")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
