"""``distca eval``: the loss of a checkpoint on given documents, by their length."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from distca.cli.command import (
    argument,
    check_one_process,
    console,
    json_switch,
    option,
    showing_progress,
)
from distca.cli.export import STEP_HELP
from distca.report.evaluation import evaluation_table


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Evaluates a checkpoint of a run: loss and perplexity by document length.

    Runs in one process, on a GPU if there is one.

    For example: distca eval runs/latest --data books/
    """

    run_folder: Path = argument("RUN", "Folder of a run of distca train.")
    data: list[str] | None = option(
        "SOURCE",
        "Documents, as in data.sources of a config; may be repeated. Default: those that the run"
        " has held out.",
    )
    step: int | None = option("N", STEP_HELP)
    tokens: str | None = option(
        "TOKENS", "Evaluate about so many tokens, such as 1M. Default: all documents."
    )
    as_json: bool = json_switch()

    def run(self) -> None:
        check_one_process("eval")
        import torch.distributed

        from distca.cli.sources import parse_tokens
        from distca.train.metrics import for_json
        from distca.train.trained import TrainedRun

        num_tokens = None if self.tokens is None else parse_tokens(self.tokens)
        trained = TrainedRun.open(self.run_folder, self.step)
        with showing_progress(
            "percent", 100, quiet=self.as_json, start="reading the checkpoint"
        ) as update:

            def show(share: float, so_far: int) -> None:
                update(round(100 * share), f"{so_far:,} tokens")

            result = trained.evaluate(self.data or (), num_tokens, show)
        torch.distributed.destroy_process_group()
        if self.as_json:
            typer.echo(json.dumps(for_json(result)))
            return
        screen = console()
        what = ", ".join(self.data) if self.data else "held-out documents"
        screen.print(f"step {result['step']} of {self.run_folder} on {what}\n", soft_wrap=True)
        screen.print(evaluation_table(result))
