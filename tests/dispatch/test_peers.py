"""Ranks that announce, and learn who is lost: real processes, ended in every way."""

from __future__ import annotations

import json
import multiprocessing as mp
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dispatch import peer_bodies
from ranks import PRELOADED

from distca.dispatch.hub import Hub, encode
from distca.dispatch.hub_address import listen

pytestmark = pytest.mark.alone
NO_WORD = "no word for {} s, look at what it does or set a longer timeout"
WITHOUT_A_WORD = "is lost (its process ended without a word)"


def run(tmp_path: Path, size: int, body: object, *args: object) -> list[list]:
    """What each rank has seen; [] if it was killed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, ranks = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        where = (theirs, rank, size, f"file://{tmp_path}/store")
        ranks.append(context.Process(target=peer_bodies.start, args=(body, *where, *args)))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    seen: list[list] = []
    try:
        for pipe in pipes:
            assert pipe.poll(60), "a rank hangs"
            try:
                seen.append(pipe.recv())
            except EOFError:
                seen.append([])
    finally:
        for rank in ranks:
            rank.kill()
    return seen


def test_equal_records_are_answered_by_one_and_others_by_all(tmp_path: Path) -> None:
    assert run(tmp_path, 3, peer_bodies.announces) == [[["a"], ["b0", "b1", "b2"], ["c"]]] * 3


def test_noted_records_are_compared_together_in_the_order_of_all(tmp_path: Path) -> None:
    seen = [["here"], ["c"], ["here"], ["b0", "b1"]]
    assert run(tmp_path, 2, peer_bodies.notes) == [seen] * 2


def test_a_rank_that_notes_fewer_records_is_named_after_the_timeout(tmp_path: Path) -> None:
    first, second, third = run(tmp_path, 3, peer_bodies.notes_too_few)
    assert first == ["ExchangeError", NO_WORD.format(0.5), "c", None, None]
    assert second == third == ["b"]


def test_noted_records_after_a_loss_raise(tmp_path: Path) -> None:
    (seen, _) = run(tmp_path, 2, peer_bodies.notes_after_a_loss)
    assert seen[0][:2] == ["PeerLostError", f"rank 1 {WITHOUT_A_WORD}"]


@pytest.mark.parametrize(("victim", "with_child"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_killed_rank_is_named_within_two_seconds(
    tmp_path: Path, victim: int, with_child: bool
) -> None:
    """Also if a process that it has forked lives on, such as a worker that loads data."""
    seen = run(tmp_path, 3, peer_bodies.is_killed, victim, with_child)
    words = f"rank {victim} {WITHOUT_A_WORD}"
    assert seen.pop(victim) == []
    assert seen == [[["PeerLostError", words], ["PeerLostError", words], words, True]] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_is_told_to_the_others(tmp_path: Path, victim: int) -> None:
    seen = run(tmp_path, 3, peer_bodies.fails, victim)
    assert seen.pop(victim) == []
    assert seen == [[f"rank {victim} is lost (it failed: OutOfMemoryError: no memory)"]] * 2


@pytest.mark.parametrize("victims", [[2], [1, 3]])
def test_all_who_are_left_get_the_same_answer(tmp_path: Path, victims: list[int]) -> None:
    seen = run(tmp_path, 4, peer_bodies.asks_who_is_left, victims)
    left = [rank for rank in range(4) if rank not in victims]
    assert seen == [[] if rank in victims else [left, victims] for rank in range(4)]


def test_an_error_that_nobody_catches_is_told_too(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\n"
        "import torch.distributed as dist\n"
        "from distca.dispatch.peers import Peers\n"
        f"store = 'file://{tmp_path}/store'\n"
        "dist.init_process_group('gloo', init_method=store, rank=int(sys.argv[1]), world_size=2)\n"
        "peers = Peers.of(dist.group.WORLD)\n"
        "here = peers.announce('here')\n"
        "peers.flush()\n"
        "here.result()\n"
        "if sys.argv[1] == '0':\n"
        "    raise MemoryError('out of memory')\n"
        "print(peers.lost_within(20))\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert ranks[1].communicate(timeout=60)[0] == (
            "rank 0 is lost (it failed: MemoryError: out of memory)\n"
        )
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_ended_is_missed_only_where_it_is_needed(
    tmp_path: Path, first: int
) -> None:
    seen = run(tmp_path, 2, peer_bodies.leaves, first)
    assert seen.pop(first) == ["last"]
    late = ["ExchangeError", "rank 1 ended before", "one more", None]
    assert seen == [[["last"], None, *([late] if first else [])]]


def test_a_late_rank_is_named_on_request(tmp_path: Path) -> None:
    seen = run(tmp_path, 3, peer_bodies.is_late)
    late = ["ExchangeError", NO_WORD.format(0.3), "second", None, "second"]
    assert seen[0] == seen[2] == late


def test_the_hub_ignores_strangers() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    hub = Hub(1, listener, "secret")
    try:
        for words in (b"GET / HTTP/1.1\r\n\r\n", encode("guess", 0), encode("secret", 5), b"[]\n"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(words)
                stranger.settimeout(5)
                assert stranger.recv(100) == b""
        with socket.create_connection(address) as rank:
            rank.sendall(encode("secret", 0) + encode("records", ["here"], [0]))
            rank.settimeout(5)
            assert rank.recv(100) == b'["same", 0]\n'
    finally:
        hub.wait()


def test_a_rank_that_will_never_come_counts_as_lost() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(2, listener, "secret")
    try:
        with socket.create_connection(listener.getsockname()) as rank, rank.makefile() as lines:
            rank.settimeout(5)
            rank.sendall(encode("secret", 0) + encode("records", ["here"], [0]))
            rank.sendall(encode("missing", 1) + encode("missing", 1))
            assert lines.readline() == '["lost", 1, "its process ended without a word"]\n'
            assert lines.readline() == '["records", 0, ["here", null], "rank 1 ended before"]\n'
            rank.sendall(encode("regroup", False))
            assert json.loads(lines.readline())[:3] == ["members", [0], []]
            with socket.create_connection(listener.getsockname()) as late:
                late.sendall(encode("secret", 1))
                late.settimeout(5)
                assert late.recv(100) == b""
    finally:
        hub.wait()


class Caller:
    """A connection to a hub."""

    def __init__(self, address: tuple[str, int], *who: object) -> None:
        self._socket = socket.create_connection(address)
        self._socket.settimeout(5)
        self._lines = self._socket.makefile()
        self.say("secret", *who)

    def say(self, *message: object) -> None:
        self._socket.sendall(encode(*message))

    def hear(self) -> list[Any]:
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def hub_of(num_ranks: int) -> Iterator[Callable[..., Caller]]:
    """A hub, to which a rank or a candidate is connected by a call."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, hub = listener.getsockname(), Hub(num_ranks, listener, "secret")
    callers = list[Caller]()

    def connect(*who: object) -> Caller:
        callers.append(Caller(address, *who))
        return callers[-1]

    try:
        yield connect
    finally:
        for caller in callers:
            caller.close()
        hub.wait()


def test_candidates_become_members_when_ranks_admit_them() -> None:
    with hub_of(1) as connect:
        rank, first, second = connect(0), connect("candidate", 7), connect("candidate", None)
        assert sorted([*first.hear(), *second.hear()], key=str) == [1, 2, *["candidate"] * 2]
        assert [rank.hear(), rank.hear()] == [["candidates", 1], ["candidates", 2]]
        rank.say("regroup", False)
        assert rank.hear()[:3] == ["members", [0], []]  # and candidates hear nothing
        rank.say("regroup", True)
        members = rank.hear()
        assert first.hear() == second.hear() == members
        assert members[:2] == ["members", [0]]
        assert sorted(wish or 0 for _, wish in members[2]) == [0, 7]
        second.close()  # after it was admitted
        cancelled = rank.hear()
        assert first.hear() == cancelled
        assert cancelled[:2] == ["cancelled", members[3]]
        assert rank.hear() == ["candidates", 0]
        rank.say("cancel", "groups")
        assert first.hear() == rank.hear() == ["cancelled", "groups", 0]
        rank.say("bye")
        rank.close()
        assert first.hear() == ["bye"]


def test_a_rank_that_does_not_answer_is_lost() -> None:
    with hub_of(3) as connect:
        ranks = [connect(number) for number in range(3)]
        for rank in ranks:  # the hub has to know all of them before it pings
            rank.say("records", ["a"], [0])
        assert [rank.hear() for rank in ranks] == [["same", 0]] * 3
        ranks[0].say("watch", [1, 2], 4)
        assert ranks[2].hear() == ["ping"]
        ranks[2].say("pong")  # and then it stops
        pings = 0
        while (said := ranks[1].hear()) == ["ping"]:
            pings += 1
            ranks[1].say("pong")
        assert said == ranks[0].hear() == ["lost", 2, "it has not answered for 4 s"]
        assert 6 <= pings <= 8  # so the 4 s have passed, and hardly more


ALONE = ["unshare", "--map-root-user", "--net"]  # a network without other machines


def can_have_a_network() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_have_a_network(), reason="needs unshare, ip and user namespaces")
@pytest.mark.parametrize("talking", [[], ["talking"]])
def test_a_node_that_is_gone_is_noticed_also_while_something_is_sent_to_it(
    talking: list[str],
) -> None:
    script = Path(__file__).with_name("gone_node.py")
    command = [*ALONE, sys.executable, str(script), *talking]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    seconds = [float(line) for line in ran.stdout.split()]
    assert len(seconds) == 2
    assert max(seconds) < 10  # 4 to 5.5 on a quiet machine


def test_ranks_of_one_node_listen_on_the_loopback_address_only() -> None:
    listener, address = listen(local=True)
    with listener:
        assert listener.getsockname()[0] == address == "127.0.0.1"


@pytest.mark.parametrize("master", ["localhost", "127.0.1.1"])
def test_the_master_of_several_nodes_is_reached_by_its_name(
    monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    listener, address = listen(local=False)
    with listener:
        assert address == master
        with socket.create_connection((address, listener.getsockname()[1]), timeout=5):
            pass


def resolves_to(*hosts: str) -> Callable[..., list[Any]]:
    """A resolver that knows a name by these addresses, in this order."""

    def look_up(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        return [one for each in hosts for one in LOOK_UP(each, port, *args, **kwargs)]

    return look_up


LOOK_UP = socket.getaddrinfo


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="has no IPv6")
@pytest.mark.parametrize("hosts", [("::1", "127.0.0.1"), ("::1",)])
def test_a_name_that_is_an_ipv6_address_for_the_master_alone(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    """Others may know it by its IPv4 address."""
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setattr(socket, "getaddrinfo", resolves_to(*hosts))
    listener, address = listen(local=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolves_to("127.0.0.1"))
    with listener:
        assert address == "node-0"
        with socket.create_connection((address, listener.getsockname()[1]), timeout=5):
            pass
