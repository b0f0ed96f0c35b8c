"""Whole runs, as ranks of the tests do them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distca.train.config import Config
from distca.train.trainer import Trainer


def fit(group: dist.ProcessGroup, settings: list[str]) -> list[dict[str, Any]]:
    """Returns the records; ``stop_after=n`` stops this rank as SIGTERM would, after n steps."""
    stops = [int(s.split("=")[1]) for s in settings if s.startswith("stop_after=")]
    config = Config.read(None, [s for s in settings if not s.startswith("stop_after=")])
    trainer = Trainer(config)

    def show(record: dict[str, Any]) -> None:
        if stops and record["step"] + 2 == stops[0]:
            trainer.stop.request()

    trainer._show = show
    return trainer.fit()
