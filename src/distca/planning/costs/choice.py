"""Cost models by name."""

from distca.planning.costs.analytic import AnalyticCost
from distca.planning.costs.base import CostModel, PairsCost
from distca.planning.costs.profile import DEFAULT_COST, Profile
from distca.planning.costs.table import TableCost
from distca.planning.models import ModelShape


def cost_model(cost: str | CostModel, shape: ModelShape) -> CostModel:
    """Returns the model for ``pairs``, ``analytic``, ``cpu``, or a profile (name or file)."""
    if not isinstance(cost, str):
        return cost
    if cost == "auto":
        cost = DEFAULT_COST
    if cost == "pairs":
        return PairsCost()
    if cost == "analytic":
        return AnalyticCost.of(shape)
    if cost == "cpu":
        return AnalyticCost.cpu(shape)
    try:
        profile = Profile.read(cost)
    except OSError:
        raise ValueError(
            f"cost {cost!r} is unknown: use pairs, analytic, cpu, h200, h200-flash,"
            " or the path of a profile file"
        ) from None
    return TableCost.from_profile(profile, shape)
