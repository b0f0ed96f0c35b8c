"""The tiny profile as a file, which is what a cluster names."""

from __future__ import annotations

import pytest
from sim.tiny import PROFILE


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profiles") / "tiny.json"
    PROFILE.write(path)
    return str(path)
