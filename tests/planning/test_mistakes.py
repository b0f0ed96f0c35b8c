"""What users of ``distca.place`` and ``distca.plan`` mistake is one sentence, never a traceback."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import distca
from distca.planning.options import PlanOptions

HUGE = 10**400
BEYOND = 10**5000  # Python does not write such numbers
ODD = (
    *(None, True, False, -1, 0, 3, 2**63, 2**70, -(2**70), HUGE, BEYOND, 1.5, float("nan")),
    *(float("inf"), "x", "", b"x", [], [1], ["x"], [None], [True, 0], [HUGE, 0], [[1]], {}),
    *({"a": 1}, object(), np.array(5), np.array([1, 2]), np.float64(2), np.int64(3), {1}, 1j, int),
)


def refused_in_a_sentence(call: Any, *args: Any, **options: Any) -> None:
    """Calls, and lets nothing pass but a ValueError of one short sentence."""
    said = ""
    try:
        call(*args, **({"model": "llama3-8b"} | options))
    except ValueError as error:
        said = str(error)
    assert len(said) < 400
    assert "sys.set_int_max_str_digits" not in said


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_odd_values_are_refused_in_a_sentence(value: Any) -> None:
    plan, place = distca.plan, distca.place
    for ranks in (value, [value, [1]], [[value], [1]]):
        refused_in_a_sentence(plan, ranks)
    refused_in_a_sentence(plan, [[64]], value)
    refused_in_a_sentence(plan, [[64]], scheduler=value)
    for documents in (value, [value]):
        refused_in_a_sentence(place, documents, 2)
    refused_in_a_sentence(place, [64, 3], value)
    refused_in_a_sentence(place, [64, 3], 2, placer=value)
    for one in fields(PlanOptions):
        refused_in_a_sentence(plan, [[64], [1]], **{one.name: value})
        refused_in_a_sentence(plan, [[64], [1]], **{"servers": 2, one.name: value})
        refused_in_a_sentence(plan, [[64], [1]], **{"model": None, "heads": 4, one.name: value})


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "key", ["document", "start", "stop", "length", "parent", "prefix", "two_way"]
)
def test_odd_fields_are_refused_in_a_sentence(key: str, value: Any) -> None:
    entry: dict[str, Any] = {"document": 0, "start": 0, "stop": 9}
    if key not in entry:
        entry = {"length": 9} | ({"parent": 0, "prefix": 1} if key != "two_way" else {})
    for odd in (value, [[0, value]]):
        refused_in_a_sentence(distca.plan, [[5, entry | {key: odd}], [1]])


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        ([[2**63], [1]], {}, "entry 0 of rank 0 is 9223372036854775808: it must be a whole number"),
        ([[{"document": 0, "start": 0, "stop": 2**70}]], {}, "stop in entry 0 of rank 0 is 11805"),
        ([[2**62] * 4], {}, "document 0 has 4611686018427387904 tokens: it needs few"),
        (5, {}, "what the ranks hold is 5: it must be a list of lists of documents, one for each"),
        (None, {}, "what the ranks hold is None: it must be a list of lists"),
        ([5], {}, "rank 0 is 5: it must be a list of documents"),
        ([[64]], {"cost": 3}, "cost 3 is unknown: use pairs, analytic, cpu, h200"),
        ([[64]], {"cost": None}, "cost None is unknown: use pairs"),
        ([[64]], {"model": 3, "heads": 2}, "model = 3: give its name or a ModelShape"),
        ([[64]], {"options": "x"}, "plan options are 'x': give a PlanOptions, or options by name"),
        ([[64]], {"token_s": HUGE}, "token_s = 10000"),
        ([[64]], {"tolerance": False}, "tolerance = False: it must be at least 0 and less"),
        ([[64], [1]], {"busy_s": [True, 0]}, "busy_s = True: give each rank a number from 0"),
        ([[64], [1]], {"speed": [1, True]}, "speed = True: give each rank a number from 0"),
        ([[64], [1]], {"busy_s": [0, HUGE]}, r"busy_s = 10{56}\.\.\.: give each rank"),
        ([[64], [1]], {"busy_s": [0, "1"]}, "busy_s = '1': give each rank a number"),
        ([[64], [1]], {"speed": 3, "servers": 1}, "1 values of speed for 3 ranks"),
    ],
)  # fmt: skip
def test_the_sentence_names_value_and_rule(ranks: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distca.plan(ranks, **({} if "options" in options else {"model": "llama3-8b"}) | options)


def test_places_of_too_many_or_too_long() -> None:
    with pytest.raises(ValueError, match="workers = 9223372036854775808: give the number of work"):
        distca.place([64], 2**63, model="llama3-8b")
    for documents in ([2**62] * 4, [2**63], [-1], [0]):
        with pytest.raises(ValueError, match=r"documents are \[.*: give a list with the length of"):
            distca.place(documents, 2, model="llama3-8b")
