"""Where the hub of a group listens, and how ranks and candidates reach it."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, NamedTuple

from distca.dispatch.hub import Hub, encode
from distca.dispatch.hub_connection import HubConnection

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
