"""``distca train --inject``: reads faults, trains with them, and tells what became of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.report.units import several
from distca.runtime.launched import RankFailedError

if TYPE_CHECKING:
    from distca.train.config import Config
    from distca.train.faults import Fault
    from distca.train.setup import Components
    from distca.train.trainer import Trainer


def read(texts: Sequence[str] | None) -> tuple["Fault", ...]:
    """Raises ValueError for text that is no fault, and for one that is given twice."""
    from distca.train.faults import parse_all

    return parse_all(texts or ())


def check(faults: Sequence["Fault"], config: "Config", components: "Components") -> None:
    """Raises ValueError for a fault that cannot come in a run, before ranks are started."""
    from distca.train.fault_places import check_faults

    check_faults(faults, components.planner, config.train)


def begin(config: "Config", faults: Sequence["Fault"]) -> None:
    """Sets the faults of an earlier run aside; whoever starts a run calls it, and not a restart."""
    from distca.train.fault_log import FaultLog

    if faults:
        FaultLog.begin(config)


def fit(trainer: "Trainer", faults: Sequence["Fault"]) -> list[dict[str, Any]]:
    from distca.train.injector import fit_with_faults

    return fit_with_faults(trainer, faults) if faults else trainer.fit()


def counts(config: "Config", faults: Sequence["Fault"]) -> dict[str, Any]:
    """Returns what became of all faults of a run, for its summary."""
    from distca.train.fault_log import FaultLog

    found = FaultLog(Path(config.out)).counts(faults)
    return {
        "planned": found.planned,
        "delivered": found.delivered,
        "recoveries": found.recoveries,
        "missing": [str(fault) for fault in found.missing],
    }


def check_delivered(result: dict[str, Any]) -> None:
    """Raises RankFailedError if a run has reached its end without all its faults."""
    if result.get("stopped") or not (missing := result.get("faults", {}).get("missing")):
        return
    planned, listed = result["faults"]["planned"], ", ".join(repr(fault) for fault in missing)
    raise RankFailedError(
        f"{len(missing)} of {several(planned, 'planned fault')} never came: {listed}; give places"
        " that the run reaches, and --fresh if it had passed them before"
    )
