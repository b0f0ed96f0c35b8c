"""A Llama-family decoder, open at the attention and cut into seams.

    seam 0        embedding              and  before layer 0
    seam l        after layer l - 1      and  before layer l
    seam L        after layer L - 1      and  final norm, output head, loss

Between two seams stands one layer's core attention, which has no weights and is computed elsewhere.
A seam is the unit of sharding: it is called once for all halves of a batch (ping and pong), so its
parameters are gathered once. A pipeline stage that holds layers [start, stop) has seams start to
stop, the first without its first part and the last without its second; so a parameter has the same
name at any split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from distca.model.config import ModelConfig
from distca.model.layers import QKV, After, Before
from distca.model.loss import Loss, cross_entropy


class Arriving(NamedTuple):
    """What one half of a batch brings to a seam. Tuples, since FSDP looks for tensors in them."""

    x: Tensor  # [T, hidden]; at seam 0 the tokens [T]
    positions: Tensor  # [T], each token's place in its document
    attended: Tensor | None = None  # [T, H, D] of the layer before; None at a stage's first seam
    labels: Tensor | None = None  # [T] of this rank's x, for seam L; without them: logits


class Leaving(NamedTuple):
    """What it takes along: q, k and v to a layer, or a loss."""

    x: Tensor  # [T, hidden]; at seam L without labels the logits [T, vocabulary]
    qkv: QKV | None = None
    loss: Loss | None = None


EMBEDDING = "seams.0.embed.weight"
Part = Callable[[Arriving], Leaving]  # a seam's work on one half
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v -> [T, H, D]
Walk = Callable[[Sequence["Seam"], list[Arriving]], list[Leaving]]


class Head(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None) -> Leaving:
        if labels is None:
            return Leaving(self.output(self.norm(x)))
        weight: Tensor = self.output.weight
        if isinstance(weight, DTensor):
            # Tensor parallel: tokens are split, so each rank takes the loss of its own with the
            # whole vocabulary, and gradients of the weight are added over ranks.
            weight = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
        return Leaving(x, loss=cross_entropy(self.norm(x), weight, labels))


class Seam(nn.Module):
    """after(number - 1) and before(number), or what stands for them at the ends of the model."""

    def __init__(
        self, config: ModelConfig, number: int, *, enters: bool = True, leaves: bool = True
    ) -> None:
        super().__init__()
        self.number = number
        first, last = number == 0, number == config.layers
        self.embed = nn.Embedding(config.vocab_size, config.hidden) if enters and first else None
        self.after = After(config) if enters and not first else None
        self.before = Before(config) if leaves and not last else None
        self.head = Head(config) if leaves and last else None

    def forward(
        self,
        halves: Sequence[Arriving],
        run: Callable[[Part, Sequence[Arriving]], list[Leaving]] | None = None,
    ) -> list[Leaving]:
        """Runs all halves of a batch, one after the other.

        ``run(part, halves)`` calls ``part`` for each half and may do more in between: combine the
        attention of a half, checkpoint the part, dispatch q, k and v before the next half runs.
        """
        if run is None:
            return [self.part(half) for half in halves]
        return run(self.part, halves)

    def part(self, half: Arriving) -> Leaving:
        """One half. To be called inside ``forward``, where parameters are gathered."""
        x = half.x
        if self.embed is not None:
            x = self.embed(x)
        if self.after is not None:
            assert half.attended is not None, f"what layer {self.number - 1} attended is missing"
            x = self.after(x, half.attended)
        if self.before is not None:
            return Leaving(x, qkv=self.before(x, half.positions))
        if self.head is not None:
            return cast(Leaving, self.head(x, half.labels))
        return Leaving(x)


class Llama(nn.Module):
    """Layers [start, stop) of a model; all of them by default.

    ``seams`` maps the number of a seam, as text, to it, in order.
    """

    def __init__(self, config: ModelConfig, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        stop = config.layers if stop is None else stop
        if not 0 <= start < stop <= config.layers:
            raise ValueError(
                f"layers [{start}, {stop}) of a model with {config.layers}: a stage holds at least"
                " one, from 0 on"
            )
        self.config, self.start, self.stop = config, start, stop
        self.seams = nn.ModuleDict()
        for number in range(start, stop + 1):
            enters = number > start or number == 0
            leaves = number < stop or number == config.layers
            self.seams[str(number)] = Seam(config, number, enters=enters, leaves=leaves)
        self.tie()

    def tie(self) -> None:
        """Makes a tied output head's weight the embedding's, again after parameters were replaced.

        Where they lie in two stages each has a copy, and whoever trains them adds their gradients.
        """
        if not self.config.tied or not self.is_whole:
            return
        first, last = self.in_order[0], self.in_order[-1]
        assert first.embed is not None
        assert last.head is not None
        last.head.output.weight = first.embed.weight

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.config.layers

    def whole_name(self, name: str) -> str:
        """What a parameter of this stage is called in the whole model: a tied head's weight is the
        embedding's."""
        return EMBEDDING if self.config.tied and name == self.output_name else name

    @property
    def output_name(self) -> str:
        return f"seams.{self.config.layers}.head.output.weight"

    @property
    def in_order(self) -> list[Seam]:
        return [cast(Seam, seam) for seam in self.seams.values()]

    def forward(self, halves: Sequence[Arriving], walk: Walk) -> list[Leaving]:
        """One pass of all halves; ``walk`` calls every seam once, in order, and attends between.

        FSDP prepares a step in the forward of its outermost module, so seams are called from here.
        """
        return walk(self.in_order, list(halves))


def plainly(attend: Attend) -> Walk:
    """The obvious walk, without overlap: the reference for every other."""

    def onward(seam: Seam, half: Arriving, leaving: Leaving) -> Arriving:
        attended = None if leaving.qkv is None else attend(seam.number, *leaving.qkv)
        return half._replace(x=leaving.x, attended=attended)

    def walk(seams: Sequence[Seam], halves: list[Arriving]) -> list[Leaving]:
        for seam in seams:
            leavings: list[Leaving] = seam(halves)
            halves = [onward(seam, *pair) for pair in zip(halves, leavings, strict=True)]
        return leavings

    return walk


def on_meta(config: ModelConfig, start: int = 0, stop: int | None = None) -> Llama:
    """A model that holds no memory yet: shard it, then ``initialize`` or load it."""
    with torch.device("meta"):
        return Llama(config, start, stop)
