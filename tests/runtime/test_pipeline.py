"""Pipelines: the work of idle stages, how often weights are gathered, and exceptions."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import World
from runtime.bodies import TINY, Case, batch_of
from runtime.recording import counted_step

from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import FORWARD
from distca.pipeline.step_planner import StepPlanner
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.planning.policies import POLICIES
from distca.runtime.launch import launch
from distca.runtime.launched import RankFailedError

FOUR = replace(TINY, layers=4)
LONG = (4000, 4000, *[500] * 16)


def planner(**more: object) -> StepPlanner:
    shape = ModelShape("wide", heads=8, kv_heads=4, head_dim=64, hidden=512, ffn=1024)
    options = {"parallel": MeshShape(pp=2), "micro_batches": 2}
    options["options"] = PlanOptions(model=shape, cost="cpu")
    masks = tuple(FOUR.mask_of(layer) for layer in range(4))
    return StepPlanner(masks=masks, **(options | more))  # type: ignore[arg-type]


def test_a_tick_is_planned_over_all_stages_each_way() -> None:
    step = planner().plan(batch_of(LONG).lengths)
    assert [len(slots) for slots in step.slots] == [2] * len(step.schedule.ticks)
    for tick, slots in zip(step.schedule.ticks, step.slots, strict=True):
        for (plan,) in slots:
            assert plan.devices.num_ranks == 2
            assert (plan.placement.tokens > 0).tolist() == [
                m is not None for m in tick.micro_batches
            ]
            work = plan.forward_load_ps if tick.phase == FORWARD else plan.backward_load_ps
            assert work.max() <= 1.03 * work.mean(), "an idle stage takes its share"
    assert step.imbalance < 1.03 < step.imbalance_before


def test_an_idle_stage_gets_more_where_the_others_have_linear_layers_to_do() -> None:
    """With two halves it can compute attention while the others run linear layers."""
    step = planner(ping_pong=True).plan(batch_of(LONG).lengths)
    first, last = step.slots[0][0][0], step.slots[-1][0][0]  # one stage alone has a micro-batch
    busy = first.devices.busy_s
    assert busy[0] > 0 == busy[1]
    assert first.forward_load_ps[1] > 1.2 * first.forward_load_ps[0]
    assert last.backward_load_ps[1] > 1.2 * last.backward_load_ps[0]
    assert last.devices.busy_s[0] == pytest.approx(2 * busy[0], rel=0.1)


def test_beside_a_dedicated_server_only_idle_stages_serve() -> None:
    step = planner(parallel=MeshShape(pp=2, servers=1)).plan(batch_of(LONG).lengths)
    for tick, slots in zip(step.schedule.ticks, step.slots, strict=True):
        idle = [m is None for m in tick.micro_batches]
        for (plan,) in slots:
            assert (plan.forward_load_ps > 0).tolist() == [*idle, True]


def test_a_slot_holds_the_stages_that_have_a_layer_left() -> None:
    step = planner(stage_sizes=(1, 3), first_trained_part=4).plan(batch_of(LONG).lengths)
    ticks = {(tick.phase, tick.micro_batches): slots
             for tick, slots in zip(step.schedule.ticks, step.slots, strict=True)}  # fmt: skip
    both = ticks["F", (1, 0)]
    assert [(p.placement.tokens > 0).tolist() for (p,) in both] == [
        [True, True],
        [False, True],
        [False, True],
    ]
    # The first trained part comes after the attention of layer 1: layers 2 and 3 run backward.
    assert [(p.placement.tokens > 0).tolist() for (p,) in ticks["B", (0, 1)]] == [[False, True]] * 2
    assert ticks["B", (1, None)] == ()
    assert step.backward_slots == (0, 2)
    assert not step.sends_gradient(1)


def test_policies_that_place_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="gathers keys within groups of workers"):
        planner(policy=POLICIES["wlb"])
    with pytest.raises(ValueError, match="4 layers on 5 stages"):
        planner(parallel=MeshShape(pp=5))


def test_weights_are_gathered_and_reduced_once_a_step(world: World) -> None:
    case = Case(MeshShape(pp=2, dp=2), FOUR, micro_batches=4)
    answers = world(4).run(counted_step, case, batch_of(), ranks=4)
    for seams, counts in answers:
        assert counts["_allgather_base_"] == seams
        assert counts["_reduce_scatter_base_"] == seams


BREAKS = """
import os
from distca.runtime import step
if os.environ["RANK"] == "1":
    whole = step._StepRun._backward
    def broken(self, micro_batch):
        if micro_batch == 1:
            raise RuntimeError("stage 1 broke in its second backward")
        return whole(self, micro_batch)
    step._StepRun._backward = broken
from distca.cli import main
main()
"""


def test_an_exception_in_one_stage_ends_all_ranks_with_its_words(tmp_path: Path) -> None:
    settings = {
        "model.sizes": "{layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}",
        "data.sources": '["fixed:100"]',
        "data.tokenizer": '"ids:61"',
        "data.context": "100",
        "train.tokens_per_step": "800",
        "parallel.pp": "2",
        "parallel.micro_batches": "4",
    }
    arguments = [f"--set={name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-c", BREAKS, "train", *arguments, f"--out={tmp_path}", "--json"]
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="stage 1 broke in its second backward"):
        launch(command, 2, tmp_path / "logs")
    assert time.monotonic() - began < 60
