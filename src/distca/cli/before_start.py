"""What ``distca train`` checks and shows before a run starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from distca.cli.command import console
from distca.report import units
from distca.report.tables import facts
from distca.runtime.shared_gpu import SharedGpu

if TYPE_CHECKING:
    import torch

    from distca.train.config import Config
    from distca.train.setup import Components


def check(config: "Config", num_ranks: int, sides: int, share_gpu: bool) -> "Components":
    """Raises ValueError for mistakes that can be found before anything is started."""
    from distca.train import metrics, setup
    from distca.train.extra import check_resumable
    from distca.train.step_folders import check_folder

    own = setup.Components.of(config, num_ranks, _device(), sides=sides, share_gpu=share_gpu)
    if config.train.saves:
        # A weight and two moments in float32; frozen weights have no moments.
        least_bytes = own.model.num_parameters * (4 if config.train.frozen else 12)
        check_folder(Path(config.out) / "checkpoints", least_bytes)
    check_resumable(config, own.model, own.loader)
    if (records := Path(config.out) / metrics.FILE).is_file():
        metrics.read(records)
    return own


def check_free_memory(config: "Config", num_ranks: int, sides: int, gpu: SharedGpu) -> None:
    """Raises ValueError if a run does not fit into what is free on the GPU that ranks share."""
    from distca.train import memory, setup

    if config.parallel.memory_gib:
        return
    model = setup.model_of(config, setup.tokenizer_of(config))
    parallel = setup.parallel_of(config, num_ranks)
    estimate = memory.memory_of(config, parallel, model, _device())
    memory.check_memory(estimate, gpu.rank_bytes // sides)


def check_trace(config: "Config") -> None:
    """Raises ValueError if a run resumes after the step to trace, which has not been traced."""
    from distca.train.step_folders import newest, step_of

    trace, first = config.train.trace, config.from_step
    if config.resume and first < 0:
        found = newest(Path(config.out) / "checkpoints")
        first = 0 if found is None else step_of(found)
    is_traced = (Path(config.out) / "traces" / "trace.json").is_file()  # before it was stopped
    if 0 <= trace < first < config.train.steps and not is_traced:
        raise ValueError(
            f"train.trace = {trace}, but the run continues from step {first} of {config.out}:"
            f" choose a step from {first} to {config.train.steps - 1}, or --from an earlier"
            " checkpoint"
        )


def announce(config: "Config", num_ranks: int, compare: bool, gpu: SharedGpu | None = None) -> None:
    """Shows what will be trained, and on what."""
    from distca.pipeline.stages import stage_layers
    from distca.train import memory, setup

    model = setup.model_of(config, setup.tokenizer_of(config))
    sizes = setup.parallel_of(config, num_ranks)
    axes = [f"{axis} {getattr(sizes, axis)}" for axis in ("pp", "dp", "cp", "tp")]
    if sizes.servers:
        axes.append(units.several(sizes.servers, "dedicated server"))
    p, t, out = config.parallel, config.train, Path(config.out)
    device = _device()
    where = "GPUs" if device.type == "cuda" else "the CPU"
    *parts, total = memory.memory_of(config, sizes, model, device).table().items()
    sizes_of_parts = ", ".join(f"{name} {gib:.2g}" for name, gib in parts)
    how = (
        "colocated and disaggregated, steps in turns"
        if compare
        else f"{p.policy}, {p.placement} placement"
    )
    stages = [stop - start for start, stop in stage_layers(model.layers, sizes.pp, p.stage_layers)]
    rows = {
        "model": f"{config.model.name}, {units.count(model.num_parameters)} parameters,"
        f" {units.several(model.layers, 'layer')}, {precision(config)}",
        "ranks": f"{num_ranks} on {where if gpu is None else 'one GPU'}: {' x '.join(axes)}",
        **({} if gpu is None else {"GPU": str(gpu)}),
        **({"pipeline": _pipeline(stages, p.micro_batches)} if sizes.pp > 1 else {}),
        "attention": how + (", ping-pong" if p.ping_pong else ""),
        "data": f"{', '.join(config.data.sources)}; documents of up to"
        f" {units.count(config.data.context)} tokens",
        "memory": f"about {total[1]:.2g} GiB on a rank: {sizes_of_parts}",
        "steps": f"{units.count(t.steps)} of {units.count(t.tokens_per_step)} tokens",
        "records": f"{out}/{'*/' if compare else ''}metrics.jsonl, logs in {out}/logs",
    }
    screen = console()
    screen.print(facts(rows))
    screen.print()


def _pipeline(layers: list[int], micro_batches: int) -> str:
    from distca.pipeline.schedule import Schedule

    held = Schedule.aligned(len(layers), micro_batches).in_flight
    return (
        f"stages of {', '.join(map(str, layers))} layers,"
        f" {micro_batches} micro-batches, of which a stage holds up to"
        f" {', '.join(map(str, held))}"
    )


def precision(config: "Config") -> str:
    """Returns the name of the dtype of computation."""
    from distca.runtime.parallelize import Precision

    return str(Precision.named(config.parallel.precision, _device()).compute).removeprefix("torch.")


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
