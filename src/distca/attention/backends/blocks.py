"""Textbook attention in blocks: any dtype and soft caps, in memory that grows with the tokens.

It is for what the kernels do not support. The arithmetic is that of ``reference``, whose scores of
a whole task would not fit: those of one head and 100,000 tokens take 40 GB.
"""

from collections.abc import Iterator

from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved, Scoring, Traits
from distca.attention.backends.parts import Part, PartsBackend, parts
from distca.attention.backends.reference import dense_backward, dense_forward, dense_refusal
from distca.planning.masks import CAUSAL, FULL, Mask


class Blocks(PartsBackend):
    """Plain arithmetic, block by block, in float32 or float64.

    block: how many queries, and how many keys, have their scores in memory at once; a window has
        its reach of keys.
    """

    name = "blocks"
    caps_scores = True
    batch_keys = 2048

    def __init__(self, block: int = 1024) -> None:
        self._block = block

    def _refusal(self, traits: Traits) -> str | None:
        return dense_refusal(traits)

    def _parts(self, queries: int, keys: int, mask: Mask) -> Iterator[Part]:
        for part in parts(queries, keys, mask):
            yield from _cut(part, self._block)

    def _part_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> Attended:
        return dense_forward(q, k, v, mask, scoring)

    def _part_backward(
        self, grad_out: Tensor, saved: Saved, mask: Mask, scoring: Scoring, deterministic: bool
    ) -> Gradients:
        return dense_backward(grad_out, saved, mask, scoring)


def _cut(part: Part, block: int) -> Iterator[Part]:
    """Cuts a rectangle into rectangles, and a causal square into squares on its diagonal and
    rectangles before them. The blocks of a window are small already.
    """
    if part.mask.reach not in (FULL, CAUSAL):
        yield part
        return
    for queries in _slices(part.queries, block):
        seen = part.keys
        if part.mask.reach == CAUSAL:
            own = part.keys.start - part.queries.start  # the key of query 0
            diagonal = slice(own + queries.start, own + queries.stop)
            yield Part(queries, diagonal, Mask(CAUSAL))
            seen = slice(part.keys.start, diagonal.start)
        for keys in _slices(seen, block):
            yield Part(queries, keys, Mask(FULL))


def _slices(whole: slice, size: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, size):
        yield slice(start, min(start + size, whole.stop))
