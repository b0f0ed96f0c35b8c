"""Checks of messages that were sent before the answers of peers have arrived."""

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock

from distca.dispatch.background import DaemonExecutor
from distca.dispatch.transports.base import Check

MAX_CHECKS = 1024  # under way
_PAUSE_S = 0.1  # in which checks are collected: a thread that wakes up often slows its host down
_log = logging.getLogger(__name__)


class LateChecks:
    """Runs checks in a thread, in order; the first that fails is raised by ``raise_failure``.

    on_failure: called at once, in that thread.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._thread = DaemonExecutor()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._checks: deque[Check] = deque()
        self._is_running = False
        self._failure: Exception | None = None
        self._is_raised = False
        atexit.register(self._end)  # runs after the thread has ended

    def add(self, check: Check) -> None:
        with self._lock:
            self._checks.append(check)
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._run)

    def raise_failure(self) -> None:
        """Raises if a check has failed; waits if too many of them are under way."""
        if self._failure is None and len(self._checks) <= MAX_CHECKS:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._checks) <= MAX_CHECKS)
            if self._failure is not None:
                self._is_raised = True
                raise self._failure

    def _run(self) -> None:
        while True:
            time.sleep(_PAUSE_S)
            with self._changed:
                checks = list(self._checks)
                if not checks:
                    self._is_running = False
                    return
            for check in checks:
                if self._failure is None:
                    self._run_one(check)
            with self._changed:
                for _ in checks:
                    self._checks.popleft()
                self._changed.notify_all()

    def _run_one(self, check: Check) -> None:
        try:
            check()
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
