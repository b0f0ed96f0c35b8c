"""``distca export``: writes a checkpoint of a run as a folder for transformers."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from distca.cli.command import argument, check_one_process, json_switch, option, showing_progress

_DTYPES = ("float32", "bfloat16", "float16")
STEP_HELP = "Step of the checkpoint. Default: the newest."


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Writes a checkpoint of a run as a Hugging Face folder.

    The folder has safetensors, config.json, generation_config.json and the tokenizer.

    For example: distca export runs/latest --out exported
    """

    run_folder: Path = argument("RUN", "Folder of a run of distca train.")
    out: Path | None = option("DIR", "Folder to write, new or empty.")
    step: int | None = option("N", STEP_HELP)
    dtype: str = option("TYPE", f"Type of the weights: {', '.join(_DTYPES)}.", "float32")
    as_json: bool = json_switch()

    def run(self) -> None:
        check_one_process("export")
        if self.out is None:
            raise ValueError("distca export needs --out DIR, a new or empty folder")
        if self.dtype not in _DTYPES:
            raise ValueError(f"--dtype {self.dtype}: choose one of {', '.join(_DTYPES)}")
        import torch

        from distca.train.trained import TrainedRun

        trained = TrainedRun.open(self.run_folder, self.step)
        with showing_progress(
            "percent", 100, quiet=self.as_json, start="reading the checkpoint"
        ) as update:

            def show(share: float) -> None:
                update(round(100 * share), f"step {trained.step}")

            result = trained.export(self.out, getattr(torch, self.dtype), show)
        if self.as_json:
            typer.echo(json.dumps(result))
            return
        typer.echo(f"step {result['step']} of {self.run_folder} written to {self.out}:")
        typer.echo(f"  {', '.join(result['files'])}")
        if not result["tokenizer"]:
            typer.echo("The run was trained on token ids, so there is no tokenizer to write.")
