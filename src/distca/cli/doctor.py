"""``distca doctor``: what this machine has for training, and what distca will do with it."""

import json
from dataclasses import dataclass
from typing import Any

import typer

from distca.cli.command import console, json_switch
from distca.report.machine import advice_of, facts_of, verdict_of


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Shows what this machine has: versions, GPUs, attention kernels, NCCL, MPS, memory and links.

    Says which attention kernels will be used, and why not others. Bandwidths are measured, which
    takes a few seconds. Afterwards, `distca selftest` checks that ranks compute the right numbers.
    """

    as_json: bool = json_switch()

    def run(self) -> None:
        record = examine()
        if self.as_json:
            typer.echo(json.dumps(record))
            return
        from distca.report.tables import facts

        screen = console()
        for title, rows in facts_of(record).items():
            screen.print(title, style="bold")
            screen.print(facts(rows))
            screen.print()
        for sentence in (verdict_of(record), *advice_of(record)):
            screen.print(sentence)


def examine() -> dict[str, Any]:
    """Returns all that can be found out about this machine, as JSON."""
    from distca.measure import machine

    return {
        "versions": machine.versions(),
        "extras": machine.OPTIONAL,
        "gpus": machine.gpus(),
        "kernels": machine.kernels(),
        "nccl": machine.sharing(),
        "memory": machine.memory(),
        "links": machine.links(),
    }
