"""Parameters of which some run by default, and the others with ``-m slow``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_slow(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Returns all names for ``pytest.mark.parametrize``; those that are not quick are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
