"""Cost models by name."""

from functools import lru_cache

from distca.planning.costs.analytic import analytic_cost, cpu_cost
from distca.planning.costs.base import PAIRS, CostModel
from distca.planning.costs.profile import DEFAULT_COST, Profile, is_shipped
from distca.planning.costs.published import SCALED
from distca.planning.costs.table import table_cost
from distca.planning.models import ModelShape
from distca.schema import shown


def cost_model(cost: str | CostModel, shape: ModelShape) -> CostModel:
    """Returns the model for ``pairs``, ``analytic``, ``cpu``, or a profile (name or file)."""
    if isinstance(cost, CostModel):
        return cost
    if not isinstance(cost, str):
        raise _unknown(cost)
    if cost == "pairs":
        return PAIRS
    if cost == "analytic":
        return analytic_cost(shape)
    if cost == "cpu":
        return cpu_cost(shape)
    name = DEFAULT_COST if cost == "auto" else cost
    if is_shipped(name):
        return _shipped_cost(name, shape)
    try:
        profile = Profile.read(name)
    except OSError:
        raise _unknown(cost) from None
    return table_cost(profile, shape)


def _unknown(cost: object) -> ValueError:
    return ValueError(
        f"cost {shown(cost)} is unknown: use pairs, analytic, cpu, h200, h200-flash,"
        f" {', '.join(SCALED)} (scaled from h200), scaled:TFLOPS:GB, or the path of a profile file"
    )


@lru_cache(maxsize=64)
def _shipped_cost(name: str, shape: ModelShape) -> CostModel:
    """Returns the costs of a profile that never changes, which is read once: plans are many."""
    return table_cost(Profile.read(name), shape)
