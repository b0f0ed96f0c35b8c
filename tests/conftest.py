"""Settings for all tests: the same examples on every machine, and shared modules importable."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import RankPool, World

# Cases are tiny, and threads would mostly wait for each other. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Test files are imported one by one (importlib mode), so what they share needs a place on the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]

# What a shell starts in the background ignores Ctrl-C, and so would the commands that tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE
)
settings.register_profile(
    "search", max_examples=1000, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.load_profile("ci")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time limit of the test begins
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    from turns import turn

    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Processes that stay for a module; a world of each size is started when first asked for.

    Not longer: groups are never freed, and the threads of many gloo groups keep a core busy.
    """
    from ranks import RankPool

    pools: dict[int, RankPool] = {}

    def ask(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield ask
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium, for tests that are marked ``browser``."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pool(world: World) -> RankPool:
    """Four ranks of a gloo world; bodies get a group of the first few."""
    return world(4)
