"""Settings of the whole suite."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Several test processes and their engines share the cores: threads of each would wait for each
# other's. Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Test folders are no packages: this is how their files import what lies among them. Not the folder
# of tests itself: the names of its folders are also those of packages.
TESTS = Path(__file__).parent
for _folder in sorted({path.parent for path in TESTS.rglob("*.py")} - {TESTS}):
    sys.path.append(str(_folder))

pytest_plugins = ("room_times", "seeding", "server_fixtures")

from depth import num_examples  # noqa: E402
from environment import clean  # noqa: E402
from processor_claims import apply  # noqa: E402

clean()
apply()  # before vLLM chooses its kernels

# A busy machine is no bug, and a failure must come again when the suite is run again.
settings.register_profile(
    "banaserve",
    deadline=None,
    derandomize=True,
    max_examples=num_examples(100),
    print_blob=True,
)
settings.load_profile("banaserve")

# Examples are packages of their own: their modules are imported as installed ones are.
for _name in ("routing_policy", "store_tier"):
    sys.path.append(str(Path(__file__).parents[1] / "examples" / _name))

# The top of the checkout is not on the path: the folder `kernels` must not be importable by that
# name. So `benchmarks` and `docs`, which lie there too, are made known by hand.
for _name in ("benchmarks", "docs"):
    _place = Path(__file__).parents[1] / _name
    _spec = importlib.util.spec_from_file_location(
        _name, _place / "__init__.py", submodule_search_locations=[str(_place)]
    )
    assert _spec is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off what imports make: millions of objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what is marked so, then what starts engines: files that take long end together."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("early") is None, item.get_closest_marker("e2e") is None

    items.sort(key=place)


_SHARED = ("tests/migration/in_process/",)
"""Folders whose files share what takes long to start: one test process runs all of them."""
_HEAVY = ("/live/", "/in_process/", "/cluster/")
"""Folders of tests with real engines."""
_HEAVY_BYTES = 10 << 30
"""Memory that such a test may take, with the process that runs it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one test process, and a folder of ``_SHARED`` too.

    As many processes run tests with engines as memory has room for; others run the rest.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    num_heavy = max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _HEAVY_BYTES)

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (folder for folder in _SHARED if nodeid.startswith(folder))
            return next(shared, None) or str(super()._split_scope(nodeid))

        def _next_scope(self, node: Any) -> str | None:
            may_be_heavy = self.nodes.index(node) < num_heavy
            light = (one for one in self.workqueue if not any(part in one for part in _HEAVY))
            return next(iter(self.workqueue) if may_be_heavy else light, None)

        def _assign_work_unit(self, node: Any) -> None:
            if (scope := self._next_scope(node)) is not None:
                self.workqueue.move_to_end(scope, last=False)
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self.workqueue and self._next_scope(node) is None and not node.shutting_down:
                node.shutdown()
            else:
                super()._reschedule(node)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _root_log_level() -> Iterator[None]:
    """A library that vLLM's server imports raises it, and later tests would see no warnings."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here, or called back, ends with the test."""
    with ExitStack() as stack:
        yield stack
