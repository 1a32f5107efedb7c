"""Tiers by name, options in human units, the board: what a user or a client can get wrong."""

from __future__ import annotations

import mmap
import os
from dataclasses import fields
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.base.plugins.discovery import PluginGroup, load_plugins
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.kvstore.daemon.options import DaemonOptions, StoreOptions
from banaserve.kvstore.daemon.process import main
from banaserve.kvstore.daemon.tiering.attached_tier import attach
from banaserve.kvstore.leases import Lookup, Slot
from banaserve.kvstore.pool import Board, BoardView
from banaserve.kvstore.tiers.interface import StoreTier
from banaserve.kvstore.tiers.registry import TIERS, distributed_tier

SOCKET = Path("store.sock")


@pytest.fixture(autouse=True)
def _tiers_of_packages() -> None:
    """Mooncake's tier is of a package beside the core, as commands and the daemon load it."""
    load_plugins({PluginGroup.STORE_TIERS: TIERS})


@pytest.mark.parametrize("name", ["ssd", "peers"])
def test_a_package_offers_no_tier_of_a_name_of_banaserve_s_own(name: str) -> None:
    with pytest.raises(UserError, match="the name is taken by banaserve"):
        TIERS.add_plugin(name, object, "acme 1.0")


def test_what_a_factory_raises_becomes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> StoreTier:
        raise RuntimeError("two\nlines")

    tier = attach("failing", fail)
    assert not tier.is_open
    assert tier.report().stats.problem == "RuntimeError: two lines"
    assert [record.message for record in caplog.records] == [
        "going on without the failing tier: RuntimeError: two lines"
    ]
    assert tier.lookup([b"k"]) == [Lookup.MISS]


@pytest.mark.parametrize("url", ["redis://host:1", "host:1", "", "mooncakes://host"])
def test_only_known_schemes(url: str) -> None:
    with pytest.raises(UserError, match="mooncake"):
        distributed_tier(url)


def test_the_scheme_chooses_the_tier() -> None:
    url = "mooncake://host:1?segment=1GiB"
    assert distributed_tier(url) is TIERS.get("mooncake")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (StoreOptions(size="x"), "not a size"),
        (StoreOptions(size="1GiB", ssd=Path("f"), ssd_size="big"), "not a size"),
        (StoreOptions(size="1GiB", ssd=Path("f"), ssd_size="1KiB"), "needs at least 256 KiB"),
        (StoreOptions(size="1GiB", distributed="redis://h"), "scheme"),
        (StoreOptions(size="1GiB", distributed="mooncake://h:1?depht=4"), "did you mean depth"),
        (StoreOptions(size="1GiB", distributed="mooncake://h:1?depth=many"), "depth=many"),
        (StoreOptions(size="1GiB", tenant_quota=0.0), "quota"),
        (StoreOptions(size="1GiB", tenant_quota=1.5), "quota"),
        (StoreOptions(size="1GiB", tenant_quota=float("nan")), "quota"),
        (StoreOptions(size="1GiB", kept_quota=1.5), "kept blocks"),
        (StoreOptions(size="1GiB", kept_quota=float("nan")), "kept blocks"),
    ],
)
def test_options_that_make_no_sense(options: StoreOptions, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        options.check()


def test_the_daemon_gets_what_serve_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--kv-store-size", "3GiB", "--kv-store-ssd", "/cache", "--kv-store-ssd-size", "5GiB"]
    argv += ["--kv-store-distributed", "mooncake://h:1", "--kv-store-tenant-quota", "0.25"]
    argv += ["--kv-store-kept-quota", "0.5", "--kv-store-verify"]
    options = StoreOptions.of(parse_serve_argv(argv))
    seen = []
    monkeypatch.setattr("banaserve.kvstore.daemon.process.serve", seen.append)
    for name, value in options.environment().items():
        monkeypatch.setenv(name, value)
    assert not any("mooncake://" in word for word in options.arguments()), "it may hold a password"
    assert main(["--socket", str(SOCKET), *options.arguments()]) == 0
    (given,) = seen
    common = {field.name: getattr(options, field.name) for field in fields(StoreOptions)}
    assert given == DaemonOptions(**common, socket_path=SOCKET)
    assert (given.ssd, given.ssd_size) == (Path("/cache"), "5GiB")
    assert given.distributed == "mooncake://h:1"
    assert (given.pool_bytes, given.verify_memory) == (3 * 2**30, True)
    assert (given.tenant_quota, given.kept_quota) == (0.25, 0.5)


@pytest.mark.parametrize("quota", ["0", "-1", "2", "nan"])
def test_serve_refuses_a_quota_that_makes_no_sense(quota: str) -> None:
    with pytest.raises(UserError, match="--kv-store-tenant-quota"):
        parse_serve_argv(["--kv-store-tenant-quota", quota])


def test_the_board_cannot_be_mapped_for_writing() -> None:
    board = Board(2**20)
    with pytest.raises(PermissionError):
        mmap.mmap(board.fd, board.num_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(board.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(board.fd, 0)
    board.close()


def test_what_the_board_says_of_a_slot() -> None:
    board = Board(2**20)
    view = BoardView(board.fd, 2**20, 5)

    def says(generation: int = 5) -> list[Lookup]:
        return view.states([Slot(3, generation, 7), Slot(3, generation, 8)])

    assert says() == [Lookup.MISS, Lookup.MISS]
    board.show_pending(3, 7)
    assert says() == [Lookup.PENDING, Lookup.MISS]
    board.show_ready(3, 7)
    assert says() == [Lookup.HIT, Lookup.MISS]
    assert says(generation=6) == [Lookup.MISS, Lookup.MISS]
    board.show_none(3)
    assert says() == [Lookup.MISS, Lookup.MISS]
    board.show_ready(3, 8)
    assert says() == [Lookup.MISS, Lookup.HIT]
    board.show_none(3)
    assert says() == [Lookup.MISS, Lookup.MISS]
    board.close()
