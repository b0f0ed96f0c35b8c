"""The settings of ``distca simulate``: each is an option and a key of a TOML file.

The keys of a file are flat, or in one section for each group of options; ``name`` in [model] is the
option ``model``, and in [cluster] it is ``cluster``. Values are text as people write it, such as
128K or 80GB, from which ``distca.cli.scenarios`` makes numbers.
"""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from distca.cli.command import option
from distca.data.length_names import FORMS
from distca.planning.policies import PLACEMENTS, POLICIES
from distca.schema import check, check_known, read_toml

# Policies, unless others are chosen.
COMPARED = ("colocated", "kk", "head-tail-cp", "wlb", "dynamic-cp", "distca")
_model, _cluster, _data, _strategy = (
    partial(option, panel=panel) for panel in ("Model", "Cluster", "Data", "Strategies to compare")
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = _model("NAME", "Name of a model, or a Hugging Face folder.", "llama3-8b")
    layers: int | None = _model(
        "N", "Number of layers; options from here on override the model's own."
    )
    hidden: int | None = _model("N", "Hidden size.")
    ffn: int | None = _model("N", "Intermediate size of the feed-forward layer.")
    heads: int | None = _model("N", "Number of query heads.")
    kv_heads: int | None = _model("N", "Number of key/value heads.")
    head_dim: int | None = _model("N", "Size of a head.")
    v_head_dim: int | None = _model("N", "Size of a head of values. Default: the model's own.")
    vocab_size: int | None = _model("N", "Size of the vocabulary.")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    cluster: str = _cluster(
        "NAME",
        "h200, h200-flash, h200-ethernet; or by published rates: h100, a100, b200, gb200, l40s."
        " Other options override it.",
        "h200",
    )
    gpus: str = _cluster(
        "N,...", "Number of GPUs, or several as in 64,128,256 to show scaling. Default: 64.", ""
    )
    gpus_per_node: int | None = _cluster("N", "GPUs of a node. Default: 8.")
    memory: str = _cluster("BYTES", "Memory of a GPU, such as 80GB; a step may use 95 % of it.", "")
    inside: str = _cluster(
        "BANDWIDTH", "Of a GPU inside its node, as bytes or bits. Default: 360GB/s.", ""
    )
    across: str = _cluster(
        "BANDWIDTH", "Of a GPU between nodes: 50GB/s (the default) or 400Gb/s.", ""
    )
    latency: float | None = _cluster("US", "Latency of an exchange between nodes, in microseconds.")
    profile: str = _cluster(
        "NAME",
        "Speed of the kernels: h200, h200-flash, a profile file, or scaled:TFLOPS:GB by a GPU's"
        " dense bf16 TFLOP/s and GB/s of memory.",
        "",
    )
    jitter: float = _cluster(
        "SHARE", "Relative standard deviation of kernel times, such as 0.05.", 0.0
    )
    link_jitter: float = _cluster("SHARE", "Relative standard deviation of exchange times.", 0.0)
    transfer_sms: float = _cluster(
        "SHARE", "Share of a GPU's SMs that transfers occupy, such as 0.1.", 0.0
    )
    slow: list[str] | None = _cluster(
        "GPU=SPEED", "Relative speed of one GPU, such as 3=0.5; may be repeated."
    )
    unknown_speeds: bool = _cluster(
        "", "Whether the speeds of slow GPUs are hidden from the planner.", False
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    lengths: str = _data(
        "LENGTHS",
        f"{FORMS}; or documents as distca plan reads them.",
        "pretrain",
    )
    context: str = _data("TOKENS", "Tokens of a sequence, and of the longest document.", "128K")
    sequences: int | None = _data(
        "N", "Sequences of a step on the first number of GPUs. Default: 32K tokens per GPU."
    )
    batches: int = _data("N", "Batches to average over.", 5)
    seed: str = _data("N,...", "Random seeds of a distribution; each draws BATCHES steps.", "0")
    end_of_document: int | None = _data("ID", "Token id that ends each document in a .npy file.")
    mask: str = _data("MASK", "causal, full, window:N, chunk:N or band:N.", "causal")


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    policy: list[str] | None = _strategy(
        "NAME", f"One of {', '.join(POLICIES)}; may be repeated. Default: {', '.join(COMPARED)}."
    )
    placement: str = _strategy(
        "NAME", f"Of policy distca: {' or '.join(PLACEMENTS)}. Default: both.", ""
    )
    sweep: bool = _strategy("", "Try all sizes of the mesh, not only those of cp.", False)
    tp: str = _strategy("N,...", "Tensor-parallel sizes. Default: the largest up to 8.", "")
    pp: str = _strategy("N,...", "Numbers of pipeline stages. Default: 1.", "")
    dp: str = _strategy("N,...", "Data-parallel sizes. Default: all that fit.", "")
    cp: str = _strategy("N,...", "Context-parallel sizes. Default: all that fit.", "")
    micro_batches: str = _strategy("N,...", "Micro-batches of a step. Default: all that fit.", "")
    servers: str = _strategy("N,...", "Dedicated servers of policy distca. Default: none.", "")
    ping_pong: bool = _strategy("", "Overlap two half-batches.", True)
    tolerance: float = _strategy("SHARE", "How far the slowest rank may be above the mean.", 0.02)
    recompute: bool = _strategy("", "Recompute all but attention in the backward pass.", True)


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class Settings(StrategyOptions, DataOptions, ClusterOptions, ModelOptions):
    pass


SECTIONS: dict[str, type] = {
    "model": ModelOptions,
    "cluster": ClusterOptions,
    "data": DataOptions,
    "strategies": StrategyOptions,
}


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file by setting."""
    tree = read_toml(path)
    values: dict[str, Any] = {}
    try:
        for key, value in tree.items():
            if isinstance(value, dict):
                values |= _read_section(key, value)
            else:
                values |= check(Settings, {key: value})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return values


def _read_section(section: str, values: dict[str, Any]) -> dict[str, Any]:
    check_known(section, SECTIONS, f"[{section}]")
    named = {section if name == "name" else name: value for name, value in values.items()}
    for other, group in SECTIONS.items():
        for field in fields(group):
            if field.name in named and other != section:
                raise ValueError(f"{section}.{field.name}: it belongs in [{other}]")
    return check(SECTIONS[section], named, section)
