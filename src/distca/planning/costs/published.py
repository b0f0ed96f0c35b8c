"""GPUs that were not measured: their published rates, relative to those of the GPU that was.

Kernels reach about the same share of a GPU's rate on all of them, so the measured rates of an H200
are scaled: attention and linear layers by dense bf16 TFLOP/s, copies by memory bandwidth. This is a
guess; ``distca profile`` measures. Any other GPU is ``scaled:TFLOPS:GB``, by its dense bf16 TFLOP/s
and the GB/s of its memory.
"""

import math
from typing import NamedTuple


class PublishedRates(NamedTuple):
    tflops: float  # dense bf16
    bytes_per_s: float  # of the memory


MEASURED = "h200"
PUBLISHED: dict[str, PublishedRates] = {
    MEASURED: PublishedRates(989.0, 4.8e12),
    "h100": PublishedRates(989.0, 3.35e12),  # SXM
    "a100": PublishedRates(312.0, 2.04e12),  # SXM, 80 GB
    "b200": PublishedRates(2250.0, 8.0e12),
    "gb200": PublishedRates(2500.0, 8.0e12),
    "l40s": PublishedRates(362.0, 0.864e12),
}
SCALED = tuple(name for name in PUBLISHED if name != MEASURED)
_PREFIX = "scaled:"


def published_rates(name: str) -> PublishedRates | None:
    """Returns the rates of a GPU that was not measured; None for any other name."""
    if name in SCALED:
        return PUBLISHED[name]
    if not name.startswith(_PREFIX):
        return None
    try:
        tflops, gigabytes = map(float, name.removeprefix(_PREFIX).split(":"))
    except ValueError:
        tflops = gigabytes = math.nan
    if not (0 < tflops < math.inf and 0 < gigabytes < math.inf):
        raise ValueError(
            f"{name!r}: write the dense bf16 TFLOP/s of the GPU and the GB/s of its memory, such as"
            " scaled:989:3350"
        )
    return PublishedRates(tflops, gigabytes * 1e9)
