"""What learned speeds cost where all ranks are equal.

    python benchmarks/learned_speeds.py                                     # two gloo ranks
    python benchmarks/learned_speeds.py --ranks 4 --model 1b --context 16384 --share-gpu

Speeds are learnt in all steps, and plans follow them in some (``blocks`` says how these are
compared with the others). Ranks have to be equal: on a machine with other work they are not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from unittest.mock import patch

import blocks
from torch import Tensor

from distca.train.run_ranks import RunRanks

AHEAD = 3  # steps from a measurement to the first plan that follows it


def switched(is_on: blocks.IsOn) -> AbstractContextManager[Any]:
    learn, steps = RunRanks.learn_speed, count(AHEAD)

    def learn_speed(ranks: RunRanks, *seconds: Tensor) -> None:
        learn(ranks, *seconds)
        if not is_on(next(steps)):
            ranks.planner = ranks.planner.with_speed((1.0,) * len(ranks.planner.speed))

    return patch.object(RunRanks, "learn_speed", learn_speed)


if __name__ == "__main__":
    blocks.main(
        blocks.Question(
            name="learned_speeds",
            title="Learned speeds of equal ranks",
            what="learned speeds",
            settings=("parallel.learn_speed=on", "train.checkpoint_every=0"),
            switched=switched,
            block=10,
            skipped=1,
        ),
        __file__,
    )
