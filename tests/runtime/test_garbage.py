"""Long-lived objects are visited by no later collection, and are freed once they are garbage."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from distca.runtime.garbage import freeze_long_lived


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_later_collections_do_not_visit_what_is_frozen() -> None:
    before = len(gc.get_objects())
    freeze_long_lived()
    assert gc.get_freeze_count() > before / 2
    assert len(gc.get_objects()) < before / 2


def test_new_garbage_is_collected() -> None:
    freeze_long_lived()
    new = weakref.ref(Node())
    gc.collect()
    assert new() is None


def test_frozen_garbage_is_collected_when_freezing_again() -> None:
    node = Node()
    old = weakref.ref(node)
    freeze_long_lived()
    del node
    gc.collect()
    assert old() is not None
    freeze_long_lived()
    assert old() is None
