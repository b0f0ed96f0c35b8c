"""What a checkpoint after every step costs.

    python benchmarks/checkpoints.py                                        # two gloo ranks
    python benchmarks/checkpoints.py --model 1b --context 16384 --share-gpu # GPU ranks

A step includes the copy of the state and, if the previous checkpoint is still being written, the
wait for it (``blocks`` says how steps are compared).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import blocks

from distca.train.config import TrainSection


def switched(is_on: blocks.IsOn) -> AbstractContextManager[Any]:
    return patch.object(TrainSection, "saves_after", lambda _, step: is_on(step))


if __name__ == "__main__":
    blocks.main(
        blocks.Question(
            name="checkpoints",
            title="A checkpoint after every step",
            what="a checkpoint",
            settings=("train.keep=1",),
            switched=switched,
            block=6,
            skipped=1,
        ),
        __file__,
    )
