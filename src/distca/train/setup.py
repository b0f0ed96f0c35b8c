"""Builds the components of a rank from a config: device, mesh, data, model and planner."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca import schema
from distca.attention.backends.base import Traits
from distca.attention.backends.choice import choose
from distca.data.fingerprint import Fingerprint, fingerprint
from distca.data.loader import Loader
from distca.data.sources import open_source
from distca.data.tokenizers import Tokenizer, open_tokenizer
from distca.dispatch.tensors import TensorSpec
from distca.model.checkpoints import check_folder, read_config
from distca.model.config import ModelConfig
from distca.model.llama import on_meta
from distca.model.sizes import model_config
from distca.pipeline.memory import GIB, Memory
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.profile import is_shipped
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.planning.spans import Ints
from distca.runtime.nodes import Nodes
from distca.runtime.parallelize import Precision, check_compile
from distca.runtime.rank_device import shares_gpu
from distca.train import agreement
from distca.train.config import Config
from distca.train.memory import (
    available_bytes,
    check_host_memory,
    check_memory,
    host_bytes,
    memory_of,
)
from distca.train.optimizer import freeze
from distca.train.trackers import check_trackers


@dataclass(frozen=True, eq=False)
class Components:
    """What a rank prepares by itself from a config, before it talks to other ranks."""

    parallel: MeshShape
    model: ModelConfig
    loader: Loader
    planner: StepPlanner
    memory: Memory  # of a worker, estimated
    weights: Fingerprint  # of the files of ``model.path``
    profile: Fingerprint  # of the file of ``parallel.cost``

    @classmethod
    def of(
        cls,
        config: Config,
        num_ranks: int,
        device: torch.device,
        *,
        nodes: Nodes | None = None,
        sides: int = 1,
        share_gpu: bool = False,
    ) -> "Components":
        """Raises ValueError for all mistakes that can be found without other ranks.

        nodes: where the ranks are; by default all on this node.
        sides: runs that share the memory of a rank.
        share_gpu: whether ranks will share a GPU; known by a launcher, and by the ranks themselves.
        """
        parallel = parallel_of(config, num_ranks)
        parallel.check(num_ranks)
        tokenizer = tokenizer_of(config)
        model = model_of(config, tokenizer)
        model.shape.share(parallel.tp)
        nodes = nodes or Nodes.one(num_ranks)
        planner = planner_of(config, parallel, model, device, nodes.ranks_per_node)
        check_backend(config, model, device)
        check_compile(config.parallel.compile, device)
        check_trackers(config.log)
        memory = memory_of(config, parallel, model, device)
        sharing = nodes.num_local if device.type == "cpu" or share_gpu or shares_gpu() else 1
        check_memory(memory, available_bytes(device, sharing, config.parallel.memory_gib) // sides)
        if device.type == "cuda" and config.train.saves:
            check_host_memory(memory.saved * nodes.num_local, host_bytes())
        # Refuses costs, speeds and limits that cannot be. What does not fit may take minutes here.
        planner.plan(_full_documents(config))
        weights: Fingerprint = {}
        if path := config.model.path:
            weights = fingerprint(sorted({Path(path) / file for file in check_folder(model, path)}))
        profile: Fingerprint = {}
        if not is_shipped(cost := config.parallel.cost) and Path(cost).is_file():
            profile = fingerprint([Path(cost)])
        loader = loader_of(config, tokenizer)
        return cls(parallel, model, loader, planner, memory, weights, profile)

    def to_json(self) -> dict[str, Any]:
        """Returns by key what all ranks must have in common."""
        return agreement.components_of(
            self.model, self.loader.fingerprints, self.weights, self.profile
        )


def facts_of(config: Config, own: Components, device: torch.device) -> dict[str, Any]:
    """Returns what a process that joins a run must have in common with its ranks, as JSON."""
    plan = own.planner.plan(_full_documents(config)).fingerprint
    facts = own.to_json() | agreement.versions()
    facts |= {"kind of device": device.type, "plan of a full batch": plan}
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def parallel_of(config: Config, world_size: int) -> MeshShape:
    """Returns the sizes of the mesh; by default dp takes the ranks that the other axes leave."""
    p = config.parallel
    others = p.pp * p.cp * p.tp
    left = world_size - p.servers
    if not p.dp and (left < others or left % others):
        raise ValueError(
            f"{world_size} ranks less {p.servers} servers cannot be divided by pp x cp x tp ="
            f" {others}: start another number of ranks, or change the sizes"
        )
    return MeshShape(p.pp, p.dp or left // others, p.cp, p.tp, p.servers, p.keep_weights)


def model_of(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """Returns the model by name or of a folder of weights, with ``model.sizes`` on top."""
    path = config.model.path
    named = read_config(Path(path)) if path else model_config(config.model.name)
    chosen = replace(named, **schema.check(ModelConfig, config.model.sizes, "model.sizes"))
    if tokenizer.vocab_size > chosen.vocab_size:
        # Weights have the vocabulary that they have.
        way_out = "set model.sizes.vocab_size"
        if path:
            way_out = "set data.tokenizer to that of the checkpoint, or choose another checkpoint"
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but model"
            f" {path or config.model.name} only {chosen.vocab_size}: {way_out}"
        )
    return chosen


def loader_of(config: Config, tokenizer: Tokenizer) -> Loader:
    data, train = config.data, config.train
    sources = [
        open_source(where, tokenizer, context=data.context, seed=train.seed)
        for where in data.sources
    ]
    loader = Loader(
        sources,
        tokens_per_step=train.tokens_per_step,
        context=data.context,
        seed=train.seed,
        weights=data.weights or None,
        overlong=data.overlong,  # type: ignore[arg-type]
        held_out=data.held_out,
        tree_tokens=train.tokens_per_step // config.parallel.num_sets,
    )
    loader.check_targets()
    if train.eval_every:
        loader.check_evaluation(train.eval_tokens)
    return loader


def tokenizer_of(config: Config) -> Tokenizer:
    d = config.data
    return open_tokenizer(d.tokenizer, bos=d.bos, eos=d.eos, add_bos=d.add_bos, add_eos=d.add_eos)


def planner_of(
    config: Config,
    parallel: MeshShape,
    model: ModelConfig,
    device: torch.device,
    ranks_per_node: int | None = None,
) -> StepPlanner:
    """Returns what plans the steps of a run.

    ranks_per_node: consecutive ranks that share a node; by default all do.
    """
    p = config.parallel
    of_plan = None if ranks_per_node is None else max(ranks_per_node // parallel.tp, 1)
    options = PlanOptions(
        model=model.shape,
        cost=p.cost,
        tolerance=p.tolerance,
        speed=p.speed or None,
        memory_bytes=math.ceil(p.attention_memory_gib * GIB) or None,
        ranks_per_node=p.ranks_per_node or of_plan,
        cp=parallel.cp,
    )
    return StepPlanner(
        parallel=parallel,
        masks=tuple(model.mask_of(layer) for layer in range(model.layers)),
        options=options.for_device(device.type),
        policy=policy_of(p.policy, p.placement),
        micro_batches=p.micro_batches,
        ping_pong=p.ping_pong,
        stage_sizes=p.stage_layers,
        first_trained_part=first_trained_part(model, config.train.frozen),
    )


def runner_options(config: Config, device: torch.device) -> dict[str, Any]:
    """Returns the options of ``StepRunner.of``."""
    return {
        "halves": 1 + config.parallel.ping_pong,
        "recompute": config.parallel.recompute,
        "backend": config.parallel.backend,
        "deterministic": config.train.deterministic,
        "dtype": Precision.named(config.parallel.precision, device).compute,
    }


def learns_speed(config: Config, device: torch.device) -> bool:
    """Returns whether plans follow the measured speed of each rank.

    Plans that depend on times differ from run to run, and without disaggregation they cannot
    give a rank less. What a CPU rank measures depends on what else its cores do.
    """
    p = config.parallel
    by_default = device.type == "cuda" or p.compensate
    wanted = by_default if p.learn_speed == "auto" else p.learn_speed == "on"
    disaggregated = policy_of(p.policy, p.placement).disaggregated
    return wanted and disaggregated and not config.train.deterministic


def _full_documents(config: Config) -> Ints:
    """Returns the lengths of a batch of documents as long as they may be."""
    full, rest = divmod(config.train.tokens_per_step, config.data.context)
    return np.append(np.full(full, config.data.context), [rest] * (rest > 0)).astype(np.int64)


def check_backend(config: Config, model: ModelConfig, device: torch.device) -> None:
    """Raises ValueError unless the backend supports this model on this device."""
    dtype = Precision.named(config.parallel.precision, device).compute
    spec = TensorSpec(model.heads, model.kv_heads, model.head_dim, model.head_dim, dtype, device)
    masks = [model.mask_of(layer) for layer in range(model.layers)]
    traits = Traits.of(spec, masks, deterministic=config.train.deterministic)
    choose(config.parallel.backend, traits)


def first_trained_part(model: ModelConfig, frozen: Sequence[str]) -> int:
    """Returns the first model part with a trained parameter (``pipeline.stages`` numbers them)."""
    if not frozen:
        return 0
    whole = on_meta(model)
    freeze(whole, frozen)
    return min(_part(name, model.layers) for name, p in whole.named_parameters() if p.requires_grad)


def _part(name: str, layers: int) -> int:
    """Returns the model part of a parameter: that of seams.3.before.norm.weight is 7.

    Seam l has the linear layers after the attention of layer l - 1 and before that of layer l.
    """
    match name.split("."):
        case "seams", _, "embed", *_:
            return 0
        case "seams", seam, "after", *_:
            return 2 * int(seam)
        case "seams", seam, "before", *_:
            return 2 * int(seam) + 1
        case _:
            return 2 * layers + 1  # the head
