"""Forward calls of torch's function on cuDNN's kernels, and of the backend ``flash``.

    python benchmarks/cudnn.py     on a GPU, about half a minute

Packed documents that begin at their first key, 32 heads of size 128, bfloat16. The function takes
documents of different lengths (``cum_seq_q`` and ``cum_seq_k``). Both are called in turns, and the
seconds of the host are those until the function returns, without a wait for the device. Writes
benchmarks/results/cudnn.md and .json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from gpu_table import gpu_of, gpu_parser, write
from torch import Tensor

from distca.attention.backends.choice import backends
from distca.attention.backends.packed import PackedCall
from distca.planning.masks import CAUSAL, Mask
from distca.planning.spans import as_ints, cumulative

HEADS, HEAD_DIM = 32, 128
SCALE = HEAD_DIM**-0.5
ROUNDS = 5
DOCUMENTS = {
    "one of 8K": [8192],
    "one of 32K": [32768],
    "one of 64K": [65536],
    "32 of 1K": [1024] * 32,
    "32K in 8 of 512 to 16K": [512, 512, 1024, 2048, 2048, 4096, 6144, 16384],
}


def timed(work: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Returns medians of device and host milliseconds, in turns after a call that loads kernels."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for number in range(ROUNDS + 1):
        for name, run in work.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before = time.perf_counter()
            start.record()
            run()
            stop.record()
            host = 1e3 * (time.perf_counter() - before)
            stop.synchronize()
            if number:
                taken[name].append((start.elapsed_time(stop), host))
    return {name: tuple(map(median, zip(*each, strict=True))) for name, each in taken.items()}  # type: ignore[misc]


def row_of(name: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    offsets = cumulative(as_ints(lengths))
    num_tokens, longest = int(offsets[-1]), max(lengths)
    shape = num_tokens, HEADS, HEAD_DIM
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    call = PackedCall.of(Mask(CAUSAL), offsets, offsets, device)
    flash = next(backend for backend in backends() if backend.name == "flash")
    on_device = torch.tensor(offsets, dtype=torch.int32, device=device)

    def by_flash() -> Tensor:
        return flash.forward(q, k, v, call, SCALE, 0.0).out

    def by_cudnn() -> Tensor:
        sizes = on_device, on_device, longest, longest
        # What follows: with log-sum-exp, no dropout, causal, no debug mask.
        options = True, 0.0, True, False
        out: Tensor = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, *sizes, *options, scale=SCALE
        )[0]
        return out

    difference = float((by_flash().float() - by_cudnn().float()).abs().max())
    found = timed({"flash": by_flash, "cudnn": by_cudnn})
    return {
        "documents": name,
        "tokens": num_tokens,
        "flash, ms": found["flash"][0],
        "cuDNN, ms": found["cudnn"][0],
        "host of flash, ms": found["flash"][1],
        "host of cuDNN, ms": found["cudnn"][1],
        "largest difference": difference,
    }


def main() -> None:
    parser = gpu_parser(__doc__.splitlines()[0])
    options = parser.parse_args()
    device = gpu_of(parser)
    write(
        options.out,
        "cudnn",
        "Packed documents with cuDNN's kernels",
        "python benchmarks/cudnn.py",
        [row_of(name, lengths, device) for name, lengths in DOCUMENTS.items()],
        f"cuDNN {torch.backends.cudnn.version()}; seconds from the call to the end of the kernel.",
    )


if __name__ == "__main__":
    main()
