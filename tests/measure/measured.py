"""A profile in a moment: few shapes, few rows, one round."""

import torch
import torch.distributed as dist

from distca.measure.bench import Bench, Scope
from distca.measure.profiling import blank, measure
from distca.model.sizes import model_config
from distca.planning.costs.profile import Profile

CPU = torch.device("cpu")
MODEL = model_config("debug")
TINY = Scope(
    queries=(16, 64),
    keys=(16, 64, 256),
    call_queries=64,
    call_keys=256,
    linear_tokens=16,
    copy_bytes=1000,
    exchange_bytes=(1000, 4000),
    rounds=1,
    round_s=0.0,
    sustained_s=0.0,
    held_out=3,
    mixed=1,
)


def tiny(scope: Scope = TINY) -> Bench:
    return Bench(MODEL, CPU, scope=scope)


def together(_: dist.ProcessGroup) -> Profile:
    """Of all ranks of the world: the exchange is measured over the default group."""
    bench = tiny()
    *_, (_, done) = measure(bench, blank(bench, "tiny"))
    return done
