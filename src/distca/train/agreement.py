"""What ranks compare before a run: their configs, versions, models and files.

Ranks with different configs would train to another loss without a word, or wait for each other.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from distca import __version__
from distca.runtime.together import from_all_ranks, together
from distca.train.config import Config

# All other keys must agree.
MAY_DIFFER = {
    "out": "that of rank 0 is used on all ranks",
    "log.tensorboard": "rank 0 writes",
    "log.wandb": "rank 0 writes",
    "log.prometheus": "rank 0 writes",
    "log.prometheus_port": "rank 0 writes",
    "parallel.memory_gib": "each rank compares its own memory",
}
_LISTED = 3  # differences in an error


def config_of(config: Config) -> dict[str, Any]:
    """Returns the config by key, and the versions of what executes it."""
    values = _flat("", config.to_json())
    return {key: value for key, value in values.items() if key not in MAY_DIFFER} | versions()


def versions() -> dict[str, str]:
    return {"version of distca": __version__, "version of torch": str(torch.__version__)}


def components_of(
    model: Any,
    data: list[dict[str, Any]],
    weights: Mapping[str, Any],
    profile: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the model's config, and the fingerprints of weights, data and costs, by key."""
    sources = {f"source {number}": values for number, values in enumerate(data)}
    files = {"weights": weights, "data": sources, "file of parallel.cost": profile}
    return _flat("", {"model config": asdict(model), **files})


def agree(mine: Mapping[str, Any]) -> None:
    """Raises ValueError on all ranks unless all were given the same, with keys and values.

    A user reads it once, as any other mistake that ranks find together.
    """
    with together():
        first, *others = from_all_ranks(dict(mine))
        for rank, other in enumerate(others, 1):
            check_equal(first, other, "on rank 0", f"on rank {rank}", "start all ranks")


def check_equal(
    first: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str, remedy: str
) -> None:
    """Raises ValueError unless both are the same; here and there are where, in words."""
    if found := differences(first, other, here, there):
        raise ValueError(f"{found}: {remedy} with the same config, versions and files")


def differences(first: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """Returns keys with both values, in words; nothing if both are the same."""
    differing = [
        f"{key} is {first.get(key, 'missing')} {here} and {other.get(key, 'missing')} {there}"
        for key in {**first, **other}
        if first.get(key) != other.get(key)
    ]
    more = f", and {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
    return ", ".join(differing[:_LISTED]) + more


def _flat(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {where: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(f"{where}.{key}" if where else str(key), inner)
    return flat
