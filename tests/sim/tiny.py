"""A model and machines with round numbers, so that a step can be worked out by hand.

                  forward    backward
before attention    1 us       2 us     of a token in a layer
after attention     2 us       4 us     likewise
head                1 us       2 us     of a token
attention           1 ns       2 ns     of a query-key pair in a layer
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distca.planning.costs.profile import Profile
from distca.planning.models import ModelShape
from distca.sim.cluster import Cluster, Link

US = 1e-6
BEFORE_S, AFTER_S, HEAD_S = 1 * US, 2 * US, 1 * US
PAIR_S = {False: 1e-9, True: 2e-9}  # by whether backward

MODEL = ModelShape(
    "tiny", heads=2, kv_heads=1, head_dim=4, layers=1, hidden=8, ffn=8, vocab_size=16
)
Q_BYTES = 2 * 2 * 4  # two bytes, two heads of four; o as well
KV_BYTES = 2 * 2 * 4  # two bytes, k and v, one head of four
BEFORE = 8 * (2 + 2) * 4  # elements of wq, wk and wv
AFTER = 8 * 8 + 3 * 8 * 8  # of wo, and of w1, w2 and w3
END = 16 * 8  # of the embedding, or of the head
LAYER = BEFORE + AFTER
OPTIMIZER_S = 40 / 1.28e9  # of a parameter: 40 bytes of it are read and written

# A pair is 4 x 2 x 4 = 32 FLOPs forward and 80 backward; a token is 2 x BEFORE = 256 FLOPs in the
# first part of a layer.
PROFILE = Profile(
    name="tiny",
    queries=(1, 4096),
    keys=(1, 4096),
    forward_tflops=((0.032, 0.032), (0.032, 0.032)),
    backward_tflops=((0.04, 0.04), (0.04, 0.04)),
    linear_tflops=2.56e-4,
    copy_bytes_per_s=1.28e9,
)

INSIDE = Link(64e6, 1 * US)  # 64 bytes in 1 us, after 1 us
ACROSS = Link(16e6, 2 * US)


def machines(profile: str, gpus: int, **changes: Any) -> Cluster:
    """One node, unless told otherwise."""
    cluster = Cluster("tiny", gpus, 8, 10**9, INSIDE, ACROSS, profile=profile)
    return replace(cluster, **changes)
