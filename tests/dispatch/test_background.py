"""Work in a background thread: what is deferred, and when it starts."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import pytest

from distca.dispatch.background import DaemonExecutor


@pytest.fixture
def done() -> list[int]:
    return []


def deferred(executor: DaemonExecutor, done: list[int], count: int) -> list[Future[None]]:
    return [executor.submit(partial(done.append, n), deferred=True) for n in range(count)]


def test_deferred_work_starts_one_after_another(done: list[int]) -> None:
    executor = DaemonExecutor()
    futures = deferred(executor, done, 3)
    for number, future in enumerate(futures):
        executor.submit(lambda: None).result(5)  # runs before what is deferred
        assert done == [*range(number)]
        executor.start()
        future.result(5)
    executor.start()  # nothing is left
    executor.shutdown()
    assert done == [0, 1, 2]


def test_work_that_is_needed_starts_with_all_before_it(done: list[int]) -> None:
    executor = DaemonExecutor()
    futures = deferred(executor, done, 4)
    for _ in range(2):  # the second time, it has been started
        executor.start(futures[1])
        futures[1].result(5)
        executor.submit(lambda: None).result(5)
        assert done == [0, 1]
    executor.shutdown()
    executor.start(futures[3])  # in a new thread
    futures[3].result(5)
    executor.shutdown()
    assert done == [0, 1, 2, 3]
