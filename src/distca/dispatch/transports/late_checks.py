"""Checks of messages that are sent before the answers of peers have arrived."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from threading import Condition, Lock

from distca.dispatch.agreement import check
from distca.dispatch.background import DaemonExecutor
from distca.dispatch.peers import Peers

MAX_CHECKS = 1024  # under way
_PAUSE_S = 0.1  # in which checks are collected: a thread that wakes up often slows its host down
_log = logging.getLogger(__name__)
_of_peers: dict[Peers, LateChecks] = {}  # kept, since the end of the process looks at them


class LateChecks:
    """Compares the messages of this rank with those of its peers, in a thread.

    The first difference is raised by ``raise_failure``. The thread that sends messages only appends
    to a list.

    on_failure: called at once, in the thread that compares.
    """

    def __init__(self, peers: Peers, on_failure: Callable[[], None]) -> None:
        self._peers, self._on_failure = peers, on_failure
        self._thread = DaemonExecutor()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._num_noted = self._num_checked = 0
        self._timeout_s = 0.0
        self._is_running = False
        self._failure: Exception | None = None
        self._is_raised = False
        atexit.register(self._end)  # runs after the thread has ended

    @classmethod
    def of(cls, peers: Peers, on_failure: Callable[[], None]) -> LateChecks:
        """Returns those of all transports that announce over the same peers, in one order."""
        return _of_peers.setdefault(peers, cls(peers, on_failure))

    def note(self, record: str, timeout_s: float) -> None:
        """Announces a message, which is compared later.

        timeout_s: how long this rank waits for the announcements of others.
        """
        with self._lock:
            self._peers.note(record)
            self._num_noted += 1
            self._timeout_s = timeout_s
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._run)

    def raise_failure(self) -> None:
        """Raises if a check has failed; waits if too many of them are under way."""
        if self._failure is None and self._num_open <= MAX_CHECKS:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._num_open <= MAX_CHECKS)
            if self._failure is not None:
                self._is_raised = True
                raise self._failure

    @property
    def _num_open(self) -> int:
        return self._num_noted - self._num_checked

    def _run(self) -> None:
        while self._num_open:
            time.sleep(_PAUSE_S)
            with self._lock:
                num_noted = self._num_noted
            self._check()
            with self._changed:
                self._num_checked = num_noted
                self._changed.notify_all()
                self._is_running = self._num_open > 0

    def _check(self) -> None:
        try:
            for noted in self._peers.take_noted():
                if self._failure is None:
                    check(partial(self._peers.wait, noted, self._timeout_s))
        except Exception as error:
            _log.error("%s", error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._on_failure()

    def _end(self) -> None:
        """Ends a process whose last messages went wrong, so that it does not end in success."""
        if self._failure is not None and not self._is_raised:
            os._exit(1)
