"""A dedicated server that joins a run between two steps.

    serve(Run.at("10.0.0.5:29500"), tell=print)

It reads the config of the run, and must have the same versions, model and data.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distca import schema
from distca.runtime.joining import Run
from distca.runtime.launched import end_to_be_started_again
from distca.runtime.nodes import Nodes
from distca.runtime.rank_device import local_device
from distca.train import agreement, setup
from distca.train.config import Config
from distca.train.faults import parse_all
from distca.train.injector import prepare_faults, steps_with_faults
from distca.train.stop import StopRequest
from distca.train.trainer import Trainer


def serve(run: Run, *, wish: int | None = None, tell: Callable[[str], None]) -> None:
    """Serves until the run ends, or until a signal, which lets it leave between two steps.

    wish: the global rank that it would like to have.

    Raises ValueError, and leaves the run as it is, if this process does not fit.
    """
    description, device = run.description, local_device()
    _check(agreement.versions(), run)
    config = schema.build(Config, description.config)
    # It holds no weights, so it does not matter which ranks it shares its node with.
    own = setup.Components.of(config, description.num_ranks, device, nodes=Nodes.one(1))
    options = replace(own.planner.options, ranks_per_node=description.ranks_per_node)
    own = replace(own, planner=replace(own.planner, options=options))
    _check(setup.facts_of(config, own, device), run)
    faults = parse_all(description.faults)
    prepare_faults(faults, device)
    stop = StopRequest()
    with stop.on_sigterm():
        tell("waiting for a place in the run")
        joined = run.join(own.parallel, device, wish, lambda: stop.requested)
        if joined is None:
            tell("left before there was a place" if stop.requested else "the run has ended")
            return
        trainer = Trainer.of_new_server(config, own, joined, stop)
        tell(f"serves as rank {joined.context.rank} from step {trainer.first_step} on")
        for _ in steps_with_faults(trainer, faults):
            pass
    if not trainer.is_needed:
        tell("left the run, since a server of another tp index is lost")
        end_to_be_started_again()
    tell("left the run" if stop.requested else "the run has ended")


def _check(mine: Mapping[str, Any], run: Run) -> None:
    facts = {key: run.description.facts.get(key, "missing") for key in mine}
    agreement.check_equal(facts, mine, "in the run", "here", "join it")
