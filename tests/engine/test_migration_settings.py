"""The settings of migration beside the user's own additional configuration."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.engine import engine_args
from banaserve.engine.migration_settings import (
    KEY,
    MigrationSettings,
    migration_options,
    settings_of,
)

SETTINGS = MigrationSettings(kv_growth=3.0)
OURS = msgspec.to_builtins(SETTINGS)


def parsed(argv: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = engine_args.parse_vllm_argv(["--model", "m", *argv]).additional_config
    return found


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ([], {}),
        (["--additional-config", json.dumps({"a_b": [1, "x"]})], {"a_b": [1, "x"]}),
        (['--additional_config={"c": {"d": 2}}'], {"c": {"d": 2}}),
        (["--additional-config.c.d", "2"], {"c": {"d": 2}}),
        (
            ["--additional-config.c", "[1]", "--additional-config.d.e", "[2]"],
            {"c": [1], "d": {"e": [2]}},
        ),
    ],
)
def test_what_the_user_gave_is_kept(argv: list[str], given: dict[str, Any]) -> None:
    ours = migration_options(SETTINGS, parsed(argv))
    assert parsed([*argv, *ours]) == {**given, KEY: OURS}


@pytest.mark.parametrize("key", [KEY, "a.b", "a=b"])
def test_what_cannot_stand_beside_it_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="additional-config has") as refused:
        migration_options(SETTINGS, {key: 1})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"overlap": 0}, {"overlap": 65}, {"kv_growth": 0.5}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    config: Any = SimpleNamespace(additional_config={KEY: wrong})
    with pytest.raises(UserError, match="overlap is 1 to 64" if "overlap" in wrong else "at least"):
        settings_of(config)
