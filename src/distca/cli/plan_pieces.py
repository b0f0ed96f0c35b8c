"""The record of a plan that its page draws: pieces, loads and traffic as plain values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from distca.cli.records import record_of, traffic_matrix
from distca.planning.costs.base import PAIRS, PS, CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.masks import Mask
from distca.planning.plan import Plan
from distca.planning.spans import Floats
from distca.planning.tasks import Tasks
from distca.planning.traffic import flows, key_moves

SPAN = ("document", "q_start", "q_stop", "kv_start", "kv_stop", "home", "server")


def pieces_record(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of a saved plan.

    data: what ``distca plan --out`` or ``Plan.save`` has written. ``load_before`` is that of the
    tokens as they were given; without it, that of the plan's own placement.
    """
    plan = Plan.from_json(data)
    cost = _cost(plan)
    record = record_of(plan, plan.placement, cost, plan.summary())
    if (before := data.get("load_before")) is not None:
        record["load_before"] = np.array(before, np.float64).reshape(2, plan.devices.num_ranks)
    return record | {
        "model": plan.shape.name,
        "nodes": plan.devices.node,
        "traffic": traffic_matrix(plan),
        "pieces": _pieces(plan, cost),
    }


def _pieces(plan: Plan, cost: CostModel) -> dict[str, Any]:
    placement, devices = plan.placement, plan.devices
    loads = (plan.forward_load_ps, plan.backward_load_ps)
    bounds = [devices.mean_ps(int(load.sum())) * (1 + plan.tolerance) / PS for load in loads]
    return {
        "num_ranks": devices.num_ranks,
        "num_workers": devices.num_workers,
        "busy_s": devices.busy_s.tolist(),
        "bound_s": bounds,
        "lengths": placement.lengths.tolist(),
        "masks": [str(Mask(int(reach))) for reach in plan.reach],
        "shards": {
            name: getattr(placement, name).tolist()
            for name in ("worker", "document", "start", "stop")
        },
        "tasks": [_tasks(plan, cost, backward=backward) for backward in (False, True)],
    }


def _tasks(plan: Plan, cost: CostModel, *, backward: bool) -> dict[str, Any]:
    """Returns the tasks of one direction by columns, with their seconds and bytes.

    q_bytes: what moves with the queries of a task, out and back.
    kv_bytes: the keys and values of its document that its server receives, for all its tasks.
    """
    tasks = plan.backward if backward else plan.forward
    placement = plan.placement
    moves = key_moves(tasks, placement)
    sent = flows(tasks, placement, plan.shape, backward=backward)
    num_moved = len(tasks.moved)  # flows of queries come before those of keys
    q_bytes = np.zeros(len(tasks), np.int64)
    q_bytes[tasks.moved] = (sent.out + sent.back)[:num_moved]
    count = placement.num_documents
    group = moves.server * count + placement.document[moves.shard]
    known, number = np.unique(group, return_inverse=True)
    of_keys = slice(num_moved, num_moved + len(group))
    received = np.bincount(number, (sent.out + sent.back)[of_keys], minlength=len(known))
    own = tasks.server * count + tasks.document
    kv_bytes = np.zeros(len(tasks), np.int64)
    if len(known):
        place = np.minimum(np.searchsorted(known, own), len(known) - 1)
        kv_bytes = np.where(known[place] == own, received[place], 0).astype(np.int64)
    return {name: getattr(tasks, name).tolist() for name in SPAN} | {
        "seconds": [float(f"{one:.4g}") for one in _seconds(plan, tasks, cost, backward)],
        "q_bytes": q_bytes.tolist(),
        "kv_bytes": kv_bytes.tolist(),
    }


def _seconds(plan: Plan, tasks: Tasks, cost: CostModel, backward: bool) -> Floats:
    """[tasks] Returns the seconds of each task, of which those of a rank add up to its load."""
    ps = tasks.ps(plan.placement, plan.reach, cost.of(backward=backward)).astype(np.float64)
    load = plan.backward_load_ps if backward else plan.forward_load_ps
    total = np.bincount(tasks.server, ps, minlength=plan.devices.num_ranks)
    share = ps / np.maximum(total[tasks.server], 1.0)
    seconds: Floats = share * load[tasks.server] / plan.devices.speed[tasks.server] / PS
    return seconds


def _cost(plan: Plan) -> CostModel:
    """Returns the cost model of a plan; that of pairs if its profile is not at hand."""
    try:
        return cost_model(plan.cost, plan.shape)
    except ValueError:
        return PAIRS
