"""Runs that several modules compare theirs with."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run with two dedicated servers to which nothing happens."""
    from train.test_lost_servers import records, run

    return records(run(tmp_path_factory.mktemp("whole") / "out", 2))
