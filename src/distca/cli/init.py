"""``distca init``: writes a training config for the machine and the model at hand."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from distca.cli.command import argument, json_switch, option
from distca.runtime.disk import writing

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class InitCommand:
    """Writes a training config for this machine: sizes that fit its memory, for a first run.

    Every key stands there with its meaning; change what you like.

    For example: distca init run.toml --model llama3-8b --data corpus.jsonl --context 64K
    """

    path: Path = argument("FILE", "Config to write.", default=Path("train.toml"))
    model: str | None = option(
        "NAME", "Name of a model, or a folder of Hugging Face weights. Default: 1b, or debug."
    )
    data: list[str] | None = option(
        "SOURCE", "Documents to train on, as data.sources names them; may be repeated."
    )
    context: str | None = option(
        "TOKENS", "Tokens of the longest document. Default: up to 32K on GPUs and 4K on CPUs."
    )
    ranks: int | None = option("N", "Ranks of the run. Default: one for each GPU, or 2 on the CPU.")
    force: bool = option("", "Replace the file if it exists.", False, "--force")
    as_json: bool = json_switch()

    def run(self) -> None:
        if self.path.exists() and not self.force:
            raise ValueError(f"{self.path} exists: give another name, or --force to replace it")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"--ranks {self.ranks}: give 1 or more")
        import torch

        from distca.cli.sources import parse_tokens
        from distca.runtime.launch import local_ranks
        from distca.train.config_text import toml
        from distca.train.first_config import first_config

        context = None if self.context is None else parse_tokens(self.context)
        # A cluster may have more ranks than this machine has GPUs.
        ranks = self.ranks or local_ranks(None)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        model = self.model or ("debug" if device.type == "cpu" else "1b")
        chosen = first_config(model, tuple(self.data or ()), context, ranks, device)
        with writing(self.path):
            self.path.write_text(toml(chosen.config))
        needs, has = chosen.memory.total / GIB, chosen.available / GIB
        parallel, train = chosen.config.parallel, chosen.config.train
        if self.as_json:
            typer.echo(json.dumps({"config": str(self.path), "ranks": ranks, "needs_gib": needs}))
            return
        ways = [
            f"tp {parallel.tp}" if parallel.tp > 1 else "",
            f"{parallel.micro_batches} micro-batches" if parallel.micro_batches > 1 else "",
            "linear layers computed again" if parallel.recompute else "",
            "two half-batches that overlap" if parallel.ping_pong else "",
        ]
        shown = "".join(f", {way}" for way in ways if way)
        typer.echo(
            f"{self.path}: {model} on {ranks} {device.type} rank{'s' * (ranks > 1)},"
            f" {train.tokens_per_step:,} tokens a step{shown};"
            f" a rank needs about {needs:.1f} of {has:.1f} GiB"
        )
        count = f" --ranks {ranks}" if self.ranks else ""
        typer.echo(f"Next: distca train {self.path}{count}")
