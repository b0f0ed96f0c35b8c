"""The usual pipeline: known sums, and a simulator that goes event by event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.draws import close
from sim.oracle import usual_pipeline

from distca.planning.spans import Floats
from distca.sim.one_f_one_b import Timeline, one_f_one_b, order


def timeline(
    forward: list[list[float]], backward: list[list[float]], passing: float = 0.0
) -> Timeline:
    """Of one group, from [stages][micro_batches]."""
    both = (np.array(times, dtype=float)[:, :, None] for times in (forward, backward))
    return one_f_one_b(*both, np.full((len(forward) - 1, len(forward[0]), 1), passing))


def end(*args: object, **options: float) -> float:
    return float(timeline(*args, **options).end.max())  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_even_times_give_the_well_known_length(stages: int, micro_batches: int) -> None:
    """(micro-batches + stages - 1) x (forward + backward)."""
    forward, backward = [[2.0] * micro_batches] * stages, [[4.0] * micro_batches] * stages
    assert end(forward, backward) == (micro_batches + stages - 1) * (2 + 4)


def test_two_stages_and_three_micro_batches() -> None:
    """With 2 forward and 4 backward:

    stage 0  F0 0-2  F1 2-4           B0 8-12   F2 12-14  B1 14-18         B2 20-24
    stage 1          F0 2-4  B0 4-8   F1 8-10   B1 10-14  F2 14-16  B2 16-20
    """
    found = timeline([[2] * 3] * 2, [[4] * 3] * 2)
    assert found.start["F"][:, :, 0].tolist() == [[0, 2, 12], [2, 8, 14]]
    assert found.stop["F"][:, :, 0].tolist() == [[2, 4, 14], [4, 10, 16]]
    assert found.start["B"][:, :, 0].tolist() == [[8, 14, 20], [4, 10, 16]]
    assert found.end[:, 0].tolist() == [24, 20]


def test_passing_on_takes_time_on_the_way_there_and_back() -> None:
    """One micro-batch, two stages: 2, 1 of sending, 2, 4, 1 of sending back, 4."""
    assert end([[2], [2]], [[4], [4]], passing=1.0) == 14


def test_every_border_of_stages_takes_its_own_time() -> None:
    """One micro-batch, three stages of 2 and 4: 1 to the second, 10 to the third, and back."""
    times = np.full((3, 1, 1), 2.0)
    found = one_f_one_b(times, 2 * times, np.array([1.0, 10.0]).reshape(2, 1, 1))
    assert found.start["F"].ravel().tolist() == [0, 2 + 1, 2 + 1 + 2 + 10]
    assert found.start["B"].ravel().tolist() == [17 + 4 + 10 + 4 + 1, 17 + 4 + 10, 17]


def test_one_heavy_micro_batch_holds_up_those_behind_it() -> None:
    """Stage 1 begins the heavy one when stage 0 has it done, at 10, and the next at 20 + 10."""
    found = timeline([[10, 1], [10, 1]], [[10, 1], [10, 1]])
    assert found.start["F"][1, :, 0].tolist() == [10, 30]
    assert found.start["B"][0, :, 0].tolist() == [30, 40]


def test_groups_do_not_wait_for_each_other() -> None:
    times = np.array([[[1.0, 5.0]]])
    found = one_f_one_b(times, 2 * times, np.zeros((0, 1, 2)))
    assert found.end.tolist() == [[3.0, 15.0]]


def test_the_order_of_the_first_and_the_last_stage() -> None:
    cells = [f"{phase}{m}" for phase, m in order(0, 3, 4)]
    assert cells == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    cells = [f"{phase}{m}" for phase, m in order(2, 3, 4)]
    assert cells == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@given(st.integers(1, 5), st.integers(1, 6))
def test_stages_hold_as_many_micro_batches_as_they_say(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        held = np.cumsum(
            [1 if phase == "F" else -1 for phase, _ in order(stage, stages, micro_batches)]
        )
        assert held.max() == min(stages - stage, micro_batches)
        assert held[-1] == 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.data())
def test_any_times_end_when_the_oracle_says(
    stages: int, micro_batches: int, groups: int, data: st.DataObject
) -> None:
    def draw(*shape: int) -> Floats:
        count = int(np.prod(shape))
        seconds = st.sampled_from([0.0, 1.0, 3.0]) | st.floats(0.0, 10.0)
        return np.array(data.draw(st.lists(seconds, min_size=count, max_size=count))).reshape(shape)

    forward, backward = (draw(stages, micro_batches, groups) for _ in range(2))
    passing = draw(stages - 1, micro_batches, groups)
    found = one_f_one_b(forward, backward, passing)
    for group in range(groups):
        times = (each[..., group].tolist() for each in (forward, backward, passing))
        for (phase, stage, m), (start, stop) in usual_pipeline(*times).items():
            assert found.start[phase][stage, m, group] == close(start)
            assert found.stop[phase][stage, m, group] == close(stop)
