"""Plan options: everything that a plan depends on besides the documents, in one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import numpy as np

from distca.planning.costs.base import BACKWARD_TIMES, PS, CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.devices import UNLIMITED, Devices
from distca.planning.masks import Mask, reach_of
from distca.planning.models import ModelShape, model_shape
from distca.planning.placement import Placement
from distca.planning.problem import Grain, Problem
from distca.planning.spans import Floats
from distca.schema import check_known, is_number, shown

_MOST_TOKEN_S = 1000.0
MOST_RANKS = 1 << 20
_SIZE, _TOKENS = (1, 1 << 20), (1, 1 << 40)
_SIZES = ("heads", "kv_heads", "head_dim", "v_head_dim", "latent_dim", "rope_dim")
_WHOLE = {  # the least and the largest value
    "heads": _SIZE,
    "kv_heads": _SIZE,
    "head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "latent_dim": _SIZE,
    "rope_dim": (0, 1 << 20),
    "servers": (0, MOST_RANKS),
    "memory_bytes": (0, UNLIMITED),
    "ranks_per_node": _SIZE,
    "cp": _SIZE,
    "tile": _TOKENS,
    "min_shard": _TOKENS,
    "search_orders": _SIZE,
    "max_tokens": _TOKENS,
}


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``distca.place`` and ``distca.plan``.

    model: a name from ``distca.planning.models`` or a shape; or heads, kv_heads and head_dim.
    v_head_dim: the head size of values, if it is another one than head_dim.
    latent_dim, rope_dim: the sizes of a latent and of the rotary part of a key, if these are sent
        instead of keys and values (``CoreAttention``'s argument ``latent``).
    mask: ``causal``, ``full``, ``window:N``, ``chunk:N`` or ``band:N``, one for all documents or
        one for each.
    cost: the cost model: the name or the file of a profile, ``analytic``, ``cpu``, ``pairs``, or a
        CostModel. ``auto`` is the profile of an H200 (see ``for_device``).
    tolerance: the slowest rank may finish at most this far above the mean, relative to the mean.
    servers: dedicated ranks beyond the workers. Workers then compute attention only with
        ``workers_serve=True``.
    speed: relative speed of each rank. busy_s: seconds of other work that each rank has to do.
    memory_bytes: limit for q, k, v and o of one layer on a rank, its own and received ones.
    ranks_per_node: consecutive ranks that share a node; by default all ranks are on one node.
    cp: size of a context-parallel group in the context-parallel policies; by default the largest
        divisor of the number of workers up to 8.
    tile, min_shard: documents are cut at multiples of ``tile`` tokens, into pieces of at least
        ``min_shard`` tokens.
    search_orders: with up to 32 ranks, the scheduler tries this many orders and keeps the plan that
        moves the fewest bytes; 1 plans fastest and moves a few percent more.
    token_s: seconds of a token in one layer without attention, forward and backward, for placers
        that balance whole steps (``karmarkar-karp``, ``dynamic-groups``); by default the FLOPs of
        the linear layers at the rate of the cost model.
    max_tokens: the most tokens that these placers may give to a worker; by default any number.
    """

    model: str | ModelShape | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    latent_dim: int | None = None
    rope_dim: int | None = None
    mask: str | Mask | Sequence[str | Mask] = "causal"
    cost: str | CostModel = "auto"
    tolerance: float = 0.02
    servers: int = 0
    workers_serve: bool | None = None
    speed: Sequence[float] | Floats | None = None
    busy_s: Sequence[float] | Floats | None = None
    memory_bytes: int | None = None
    ranks_per_node: int | None = None
    cp: int | None = None
    tile: int = 128
    min_shard: int = 128
    search_orders: int = 8
    token_s: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.token_s is not None and not is_number(self.token_s, 0, _MOST_TOKEN_S):
            raise ValueError(
                f"token_s = {shown(self.token_s)}: it must be at least 0 and at most"
                f" {_MOST_TOKEN_S:g} seconds"
            )
        if not is_number(self.tolerance, 0, 1) or self.tolerance == 1:
            raise ValueError(
                f"tolerance = {shown(self.tolerance)}: it must be at least 0 and less than 1"
            )
        if not isinstance(self.workers_serve, bool | np.bool_ | None):
            raise ValueError(
                f"workers_serve = {shown(self.workers_serve)}: it must be True, False or None"
            )
        for name, (least, most) in _WHOLE.items():
            value, default = getattr(self, name), getattr(PlanOptions, name)
            if value is default:
                continue
            if not (isinstance(value, Integral) and is_number(value, least, most)):
                raise ValueError(
                    f"{name} = {shown(value)}: it must be a whole number from {least} to {most}"
                )
        if not isinstance(self.model, str | ModelShape | None):
            raise ValueError(f"model = {shown(self.model)}: give its name or a ModelShape")
        if self.model is not None and any(size is not None for size in self._sizes):
            name = self.model if isinstance(self.model, str) else self.model.name
            raise ValueError(f"model {name} and heads are both given: give one of them")

    @classmethod
    def of(cls, options: PlanOptions | None, changes: dict[str, Any]) -> PlanOptions:
        """Returns ``options``, or the defaults, with ``changes`` applied."""
        if not isinstance(options, PlanOptions | None):
            raise ValueError(
                f"plan options are {shown(options)}: give a PlanOptions, or options by name, such"
                " as model='llama3-8b'"
            )
        for name in changes:
            check_known(name, [field.name for field in fields(cls)], f"plan option {name!r}")
        return replace(cls() if options is None else options, **changes)

    @property
    def _sizes(self) -> list[int | None]:
        return [getattr(self, name) for name in _SIZES]

    def of_shape(self, shape: ModelShape) -> PlanOptions:
        """Returns the same options for a shape, instead of the model or the sizes."""
        changes: dict[str, Any] = dict.fromkeys(_SIZES) | {"model": shape}
        return replace(self, **changes)

    @property
    def shape(self) -> ModelShape:
        """The shape of the model's attention."""
        if isinstance(self.model, ModelShape):
            return self.model
        if self.model is not None:
            return model_shape(self.model)
        if self.heads is None or self.head_dim is None:
            raise ValueError("no model is given: give model, or heads, kv_heads and head_dim")
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        return ModelShape(
            "custom",
            self.heads,
            kv_heads,
            self.head_dim,
            v_head_dim=self.v_head_dim or 0,
            latent_dim=self.latent_dim or 0,
            rope_dim=self.rope_dim or 0,
        )

    def for_device(self, device_type: str) -> PlanOptions:
        """Returns the same options with ``auto`` costs resolved for ``cuda`` or ``cpu``."""
        if self.cost == "auto" and device_type == "cpu":
            return replace(self, cost="cpu")
        return self

    def problem(self, placement: Placement) -> Problem:
        """Returns the input of placers and schedulers."""
        shape, workers = self.shape, placement.num_workers
        cost = cost_model(self.cost, shape)
        token_s = self.token_s
        if token_s is None:
            flops = (1 + BACKWARD_TIMES) * shape.linear_flops_per_token
            token_s = flops / (cost.linear_tflops * 1e12)
        reach = reach_of(self.mask, placement.num_documents)
        if placement.masks(reach).all_causal:
            cost = cost.for_causal_tasks()
        # Nodes have 8 ranks typically.
        largest_cp = max(size for size in range(1, 9) if workers % size == 0)
        return Problem(
            placement=placement,
            reach=reach,
            devices=Devices.of(
                workers,
                self.servers,
                workers_serve=self.workers_serve,
                speed=self.speed,
                busy_s=self.busy_s,
                memory_bytes=self.memory_bytes,
                ranks_per_node=self.ranks_per_node,
            ),
            shape=shape,
            cost=cost,
            tolerance=self.tolerance,
            grain=Grain(self.tile, self.min_shard),
            cp=largest_cp if self.cp is None else self.cp,
            search_orders=self.search_orders,
            token_ps=round(token_s * PS),
            max_tokens=UNLIMITED if self.max_tokens is None else self.max_tokens,
        )
