"""Two ends of a connection whose network is gone; run in a network of its own by ``test_peers``.

Prints for each end after how many seconds it has noticed, or ``inf``.
"""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

from distca.dispatch.hub import keep_alive

WAIT_S = 20.0


def talk(connection: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection.sendall(b"something\n")
            time.sleep(0.1)


def noticed_after(connection: socket.socket, began: float) -> float:
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(1000):
            pass
    except OSError as error:
        if error.errno is None:  # the time limit
            return float("inf")
    return time.monotonic() - began


def main(*talking: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    listener = socket.create_server(("127.0.0.1", 0))
    ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for end in ends:
        keep_alive(end)
    if talking:
        Thread(target=talk, args=(ends[0],), daemon=True).start()
        time.sleep(0.5)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began = time.monotonic()
    for end in ends:
        print(noticed_after(end, began), flush=True)


main(*sys.argv[1:])
