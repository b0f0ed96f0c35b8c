"""A process that joins a run by an address where no run is."""

import socket

import pytest

from distca.runtime import joining
from distca.runtime.joining import Run


def test_what_listens_and_says_nothing_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=rf"^--join {address}: no run answers .* silent for 1 s"
        ):
            Run.at(address)


@pytest.mark.parametrize("address", ["x", ":5", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=rf"^--join {address}: give HOST:PORT, as the run shows"):
        Run.at(address)
