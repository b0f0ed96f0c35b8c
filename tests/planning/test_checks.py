"""``verify`` refuses plans that were changed after planning."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from strategies import OWN_BYTES, Batch, shard

from distca.planning.checks import verify
from distca.planning.plan import Plan
from distca.planning.tasks import Tasks

FINE = {"cost": "pairs", "tile": 4, "min_shard": 4}


def pick(tasks: Tasks, rows: list[int]) -> Tasks:
    columns = {field.name: getattr(tasks, field.name)[rows] for field in fields(tasks)}
    return replace(tasks, **columns)


def shifted(tasks: Tasks, column: str, row: int, by: int) -> Tasks:
    values = getattr(tasks, column).copy()
    values[row] += by
    return replace(tasks, **{column: values})


def drop_first(tasks: Tasks) -> Tasks:
    return pick(tasks, list(range(1, len(tasks))))


def drop_last(tasks: Tasks) -> Tasks:
    return pick(tasks, list(range(len(tasks) - 1)))


def repeat(tasks: Tasks) -> Tasks:
    return pick(tasks, [0, *range(len(tasks))])


def overlap(tasks: Tasks) -> Tasks:
    return shifted(tasks, "q_start", 1, -1)


def gap(tasks: Tasks) -> Tasks:
    return shifted(shifted(tasks, "q_stop", 0, -1), "kv_stop", 0, -1)


def extra_key(tasks: Tasks) -> Tasks:
    return shifted(tasks, "kv_stop", 0, 1)


def missing_key(tasks: Tasks) -> Tasks:
    return shifted(tasks, "kv_start", 0, 1)


def wrong_home(tasks: Tasks) -> Tasks:
    return shifted(tasks, "home", 0, 1)


def sound() -> Plan:
    plan = Batch([[100], [8, 8], []], {**FINE, "tolerance": 0.1}).plan()
    verify(plan)
    assert len(plan.forward) > 3
    return plan


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (drop_first, "every query token exactly once"),
        (drop_last, "every query token exactly once"),
        (repeat, "every query token exactly once"),
        (overlap, "every query token exactly once"),
        (gap, "every query token exactly once"),
        (extra_key, "not those that its mask needs"),
        (missing_key, "not those that its mask needs"),
        (wrong_home, "more than one worker"),
    ],
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_tampered_tasks_are_refused(
    tamper: Callable[[Tasks], Tasks], message: str, way: str
) -> None:
    plan = sound()
    with pytest.raises(ValueError, match=f"^{way}: .*{message}"):
        verify(replace(plan, **{way: tamper(getattr(plan, way))}))


def test_queries_of_two_homes_in_one_task_are_refused() -> None:
    plan = Batch([[shard(0, 0, 8)], [shard(0, 8, 16)]], {**FINE, "policy": "colocated"}).plan()
    joined = pick(plan.forward, [0])
    joined = replace(joined, q_stop=np.asarray([16]), kv_stop=np.asarray([16]))
    with pytest.raises(ValueError, match="more than one worker"):
        verify(replace(plan, forward=joined))


def test_a_task_on_a_rank_that_does_not_serve_is_refused() -> None:
    plan = Batch([[100], [8, 8]], {**FINE, "servers": 1}).plan()
    with pytest.raises(ValueError, match="does not serve"):
        verify(replace(plan, forward=replace(plan.forward, server=plan.forward.home)))


def test_a_straggler_that_is_not_said_is_refused() -> None:
    plan = Batch([[100], [8, 8], []], {**FINE, "policy": "colocated"}).plan()
    verify(plan)
    with pytest.raises(ValueError, match="above 1"):
        verify(replace(plan, shortfall=""))


def test_another_mask_is_refused() -> None:
    plan = sound()
    with pytest.raises(ValueError, match="not those that its mask needs"):
        verify(replace(plan, reach=np.full(3, 7)))


def test_a_plan_over_its_memory_is_refused() -> None:
    plan = sound()
    full = np.full(3, 100 * OWN_BYTES)
    full[2] = OWN_BYTES
    assert 2 in plan.forward.server
    with pytest.raises(ValueError, match="memory"):
        verify(replace(plan, devices=replace(plan.devices, memory_bytes=full)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"document": 3}, "a document that is not one of 0 to 2"),
        ({"document": -1}, "a document that is not one of 0 to 2"),
        ({"server": 3}, "a server that is not one of 0 to 2"),
        ({"q": [1, 100]}, "every query token exactly once"),
        ({"kv": [1, 100]}, "not those that its mask needs"),
    ],
)
def test_a_plan_that_was_edited_is_not_read(change: dict[str, object], message: str) -> None:
    data = sound().to_json()
    Plan.from_json(data)
    with pytest.raises(ValueError, match=f"^forward: .*{message}"):
        Plan.from_json(data | {"tasks": [data["tasks"][0] | change, *data["tasks"][1:]]})
    with pytest.raises(ValueError, match="every query token exactly once"):
        Plan.from_json(data | {"tasks": [data["tasks"][0], *data["tasks"]]})


def test_a_plan_with_other_documents_than_masks_is_not_read() -> None:
    data = sound().to_json()
    with pytest.raises(ValueError, match="not one of 0 to 1, one for each mask"):
        Plan.from_json(data | {"masks": data["masks"][:2]})
