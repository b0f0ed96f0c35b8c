"""Plain records of plans, which ``distca.report`` shows and ``--json`` prints."""

import time
from typing import Any

import numpy as np

from distca.dispatch.layout import Layout
from distca.planning.costs.base import CostModel
from distca.planning.devices import Devices
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import backward_traffic, forward_flows, forward_traffic


def summary_of(plan: Plan) -> dict[str, Any]:
    """Returns the plan's summary and the seconds for the layout of the rank with most traffic."""
    busiest = int(np.argmax(plan.traffic.send + plan.traffic.recv))
    began = time.perf_counter()
    Layout.of(plan, busiest)
    return plan.summary() | {"layout_s": time.perf_counter() - began}


def record_of(
    plan: Plan, given: Placement, cost: CostModel, summary: dict[str, Any]
) -> dict[str, Any]:
    """Compares the plan with attention at home: every task on the worker that holds its queries."""
    at_home = Tasks.at_home(given, plan.reach)
    work = at_home.work_ps(given, plan.reach, cost, given.num_workers)
    workers, node = Devices.of(given.num_workers), plan.devices.node
    forward = forward_traffic(at_home, given, plan.shape, node)
    before = {
        "imbalance_each": [workers.imbalance(one) for one in work],
        "bytes_total": forward.total,
        "bytes_send_max": int(forward.send.max()),
        "bytes_recv_max": int(forward.recv.max()),
        "bytes_backward": backward_traffic(at_home, given, plan.shape, node).total,
        "tasks": len(at_home),
    }
    after = {"imbalance_each": imbalances(plan)} | {
        key: summary[key] for key in before if key in summary
    }
    missing = np.zeros(plan.devices.num_ranks - given.num_workers)  # idle servers
    return {
        "summary": summary,
        "before": before,
        "after": after,
        "bound": 1.0 + plan.tolerance,
        "load_before": np.stack([np.append(over_mean(workers, one), missing) for one in work]),
        "load_after": np.stack(
            [over_mean(plan.devices, w) for w in (plan.forward_work_ps, plan.backward_work_ps)]
        ),
    }


def comparison_row(plan: Plan, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of ``report.plans.compare_table``."""
    tokens = plan.placement.tokens
    return summary | {
        "imbalance_each": imbalances(plan),
        "tokens_imbalance": float(tokens.max() / max(tokens.mean(), 1.0)),
    }


def imbalances(plan: Plan) -> list[float]:
    return [plan.devices.imbalance(w) for w in (plan.forward_work_ps, plan.backward_work_ps)]


def over_mean(servers: Devices, work: Ints) -> Floats:
    """Returns the finishing time of each rank [ranks], relative to the mean."""
    return servers.seconds_ps(work) / max(servers.mean_ps(int(work.sum())), 1.0)


def traffic_matrix(plan: Plan) -> Ints:
    """Returns bytes [sender, receiver] of one layer's forward: q and kv out, o back."""
    flows = forward_flows(plan.forward, plan.placement, plan.shape, plan.gather)
    matrix = np.zeros((plan.devices.num_ranks,) * 2, np.int64)
    np.add.at(matrix, (flows.source, flows.target), flows.out)
    np.add.at(matrix, (flows.target, flows.source), flows.back)
    return matrix
