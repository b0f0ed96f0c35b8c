"""Where the hub of a group listens, and how ranks and candidates reach it."""

from __future__ import annotations

import json
import os
import secrets
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from distca.dispatch.hub import Hub, encode
from distca.dispatch.hub_connection import HubConnection
from distca.dispatch.peer_news import PeerLostError

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 30.0


class HubAddress(NamedTuple):
    """The address of a hub, and the secret that lets a process talk to it."""

    host: str
    port: int
    token: str

    def connect(self, *who: Any) -> HubConnection:
        """Returns a connection to the hub. Raises OSError if nobody listens.

        who: a rank, or ``"candidate"`` and its wish.
        """
        connected = socket.create_connection((self.host, self.port), _CONNECT_S)
        connected.settimeout(None)
        connected.sendall(encode(self.token, *who))
        return HubConnection(connected)


def reach_hub(group: dist.ProcessGroup) -> tuple[Hub | None, HubConnection, HubAddress]:
    """Connects this rank to the hub of a group, which is in the process of the first rank.

    All ranks must ask. Raises ``PeerLostError`` if the first rank does not answer.
    """
    rank, size = group.rank(), group.size()
    # The store of torchrun outlives its ranks: those that it restarts must not find an earlier hub.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d.PrefixStore(f"distca {attempt}", group.get_group_store())
    store.set(f"node {rank}", socket.gethostname())
    hub = None
    if rank == 0:
        nodes = {store.get(f"node {other}") for other in range(size)}
        hub, address = start_hub(size, local=len(nodes) == 1)
        store.set("hub", json.dumps(address))
    address = HubAddress(*json.loads(store.get("hub")))
    try:
        return hub, address.connect(rank), address
    except OSError as error:
        first = dist.get_process_group_ranks(group)[0]
        raise PeerLostError(
            f"rank {first} does not answer at {address.host} port {address.port} ({error}): it"
            " has ended, or this node cannot reach that one",
            first,
        ) from error


def start_hub(num_ranks: int, *, local: bool) -> tuple[Hub, HubAddress]:
    """Starts a hub in this process, for ranks of this node only or of several."""
    listener, host = listen(local=local)
    address = HubAddress(host, listener.getsockname()[1], secrets.token_hex(16))
    return Hub(num_ranks, listener, address.token), address


def listen(*, local: bool) -> tuple[socket.socket, str]:
    """Returns a socket that listens where the other ranks can reach it, and its address.

    On several nodes that is the interface from which this node reaches the master; if it is the
    master itself, all interfaces, under the name by which the others have reached it already.
    """
    if local:
        return socket.create_server((_LOOPBACK, 0)), _LOOPBACK
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    # Its own name may be an IPv6 address for a node, and an IPv4 address for others.
    family, _, _, _, name = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)  # sends nothing
        address = probe.getsockname()[0]
    if address.startswith("127.") or address in ("::1", name[0]):
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(("", 0), family=family, dualstack_ipv6=both), master
    return socket.create_server((address, 0), family=family), address
