"""GPUs that were not measured: their published rates, relative to those of the GPU that was.

Kernels reach about the same share of a GPU's rate on all of them, so the measured rates of an H200
are scaled: attention and linear layers by dense bf16 TFLOP/s, copies by memory bandwidth. This is a
guess; ``distca profile`` measures.
"""

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
