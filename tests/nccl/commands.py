"""``distca train --share-gpu`` as tests call it."""

from __future__ import annotations

import sys
from pathlib import Path

COMMAND = [sys.executable, "-P", "-m", "distca"]
LIMIT_S = 110
TRAIN = {
    "model.sizes": "{layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128}",
    "data.sources": '["lognormal:300:1"]',
    "data.tokenizer": '"ids:200"',
    "data.context": "1000",
    "train.tokens_per_step": "8000",
    "train.warmup": "1",
}


def train(folder: Path, steps: int, **settings: object) -> list[str]:
    """Returns the command; settings as ``parallel__servers=2``."""
    given = {name.replace("__", "."): str(value) for name, value in settings.items()}
    sets = [f"--set={name}={value}" for name, value in (TRAIN | given).items()]
    command = [*COMMAND, "train", "--share-gpu", *sets, f"--set=train.steps={steps}"]
    return [*command, f"--out={folder}", "--json", "--fresh"]
