"""Plans as JSON values. What is read may have been edited, so nothing about it is assumed.

``read`` refuses what is no plan at all; ``checks.verify`` then refuses plans that compute something
else than attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from distca.planning.devices import Devices
from distca.planning.masks import CAUSAL, Mask
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.prefixes import NO_PARENT, Prefixes
from distca.planning.spans import Ints, as_ints
from distca.planning.tasks import Tasks
from distca.planning.two_way import TwoWaySpans

_SUMMARY: dict[str, type] = {
    "policy": str,
    "cost": str,
    "tolerance": float,
    "imbalance_before": float,
    "bytes_lower_bound": int,
    "shortfall": str,
    "plan_s": float,
}
_WORDS = {int: "a whole number of at least 0", float: "a finite number of at least 0", str: "text"}


def of_placement(placement: Placement) -> list[list[dict[str, int]]]:
    ranks: list[list[dict[str, int]]] = [[] for _ in range(placement.num_workers)]
    parent, prefix = placement.prefixes.parent.tolist(), placement.prefixes.length.tolist()
    for worker, document, start, stop in placement.shards():
        shard = {"document": document, "start": start, "stop": stop}
        if prefix[document]:
            shard |= {"parent": parent[document], "prefix": prefix[document]}
        ranks[worker].append(shard)
    return ranks


def of_two_way(placement: Placement) -> list[list[int]]:
    """Returns document, start and stop of each two-way span."""
    two_way = placement.two_way
    rows: list[list[int]] = np.stack([two_way.document, two_way.start, two_way.stop], 1).tolist()
    return rows


def of_devices(devices: Devices) -> dict[str, Any]:
    return {one.name: np.asarray(getattr(devices, one.name)).tolist() for one in fields(devices)}


def of_tasks(tasks: Tasks) -> list[dict[str, Any]]:
    columns = (tasks.document, tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
    rows = np.stack([*columns, tasks.server], 1).tolist()
    return [{"document": d, "q": [a, b], "kv": [c, e], "server": s} for d, a, b, c, e, s in rows]


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``Plan``; raises ``ValueError`` where a value is of another kind."""
    try:
        return _read(data)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"this is not a plan as Plan.save writes it ({type(error).__name__}: {error}):"
            " make it again with distca.plan"
        ) from error


def _read(data: Mapping[str, Any]) -> dict[str, Any]:
    masks = [Mask.parse(_value(mask, str, "a mask")) for mask in _list(data["masks"], "masks")]
    two_way = _list(data["two_way"], "two_way")
    spans = TwoWaySpans.from_rows(_ints(two_way, (len(two_way), 3), "two_way"))
    placement = _placement(_list(data["placement"], "placement"), len(masks), spans)
    forward, backward = _tasks(data["tasks"], placement), data["backward_tasks"]
    devices = _devices(data["devices"], placement.num_workers)
    summary = {name: data["summary"][name] for name in _SUMMARY}
    if not 0 <= _value(summary["tolerance"], float, "tolerance") < 1:
        raise ValueError(f"tolerance is {summary['tolerance']!r}: it must be from 0 to below 1")
    model = {
        name: _value(value, str if name == "name" else int, f"{name} of the model")
        for name, value in data["model"].items()
    }
    loads = {
        name: _ints(data[name], (devices.num_ranks,), name)
        for name in ("forward_load_ps", "backward_load_ps")
    }
    if any(np.any(load < 0) or load.sum(dtype=np.float64) > 2.0**62 for load in loads.values()):
        raise ValueError("a load is negative or too large: loads are picoseconds of at least 0")
    return dict(
        placement=placement,
        reach=as_ints([mask.reach for mask in masks]),
        devices=devices,
        shape=ModelShape(**model),
        forward=forward,
        backward=forward if backward is None else _tasks(backward, placement),
        gather=_value(data["gather"], int, "gather"),
        **loads,
        **{name: _value(summary[name], kind, name) for name, kind in _SUMMARY.items()},
    )


def _placement(ranks: Sequence[Any], num_documents: int, two_way: TwoWaySpans) -> Placement:
    rows = [
        (
            worker,
            shard["document"],
            shard["start"],
            shard["stop"],
            shard.get("parent", NO_PARENT),
            shard.get("prefix", 0),
        )
        for worker, shards in enumerate(ranks)
        for shard in _list(shards, f"placement of rank {worker}")
    ]
    whole = _ints(rows, (len(rows), 6), "placement")
    table, parents = whole[:, :4], whole[:, 4:]
    if np.any((table < 0) | (table > CAUSAL)) or np.any(table[:, 1] >= num_documents):
        raise ValueError(
            f"a shard has a document that is not one of 0 to {num_documents - 1}, one for each"
            f" mask, or positions that are not between 0 and {CAUSAL}"
        )
    prefixes = Prefixes.none(num_documents)
    prefixes.parent[table[:, 1]], prefixes.length[table[:, 1]] = parents.T
    return Placement.from_shards(None, table, len(ranks), prefixes, two_way)


def _tasks(rows: Any, placement: Placement) -> Tasks:
    table = [(task["document"], *task["q"], *task["kv"], task["server"]) for task in rows]
    columns = _ints(table, (len(table), 6), "tasks").T.copy()
    document, q_start, q_stop, kv_start, kv_stop, server = columns
    home = placement.home(document, q_start)
    return Tasks(document, q_start, q_stop, kv_start, kv_stop, home, server)


def _devices(data: Mapping[str, Any], num_workers: int) -> Devices:
    devices = Devices(**data)
    if devices.num_workers != num_workers or devices.num_ranks < num_workers:
        raise ValueError(
            f"tokens are placed on {num_workers} workers, but the devices are"
            f" {devices.num_workers!r} workers of {devices.num_ranks} ranks"
        )
    return devices


def _ints(values: Any, shape: tuple[int, ...], what: str) -> Ints:
    """Returns whole numbers of 64 bits as an array of a shape; nothing else is converted."""
    try:
        array = np.asarray(values).reshape(-1, *shape[1:])
    except ValueError:
        raise ValueError(f"{what} has entries of different lengths") from None
    if array.shape != shape or (array.size and array.dtype.kind != "i"):
        raise ValueError(f"{what} must hold {shape} whole numbers of 64 bits")
    return array.astype(np.int64)


def _list(values: Any, what: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{what} is {values!r}: it must be a list")
    return list(values)


def _value(value: Any, kind: type, what: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) or (kind is not str and not 0 <= value < 2.0**62):
        raise ValueError(f"{what} is {value!r}: it must be {_WORDS[kind]}")
    return value
