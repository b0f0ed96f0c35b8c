"""A Llama-family decoder without its core attention: a sequence of seams.

    seam 0        embedding                            and  layer 0 before its attention
    seam l        layer l - 1 after its attention      and  layer l before its attention
    seam L        layer L - 1 after its attention      and  final norm, output head, loss

Between two seams is the core attention of one layer, which has no weights and is computed by the
caller. A seam is the unit of sharding: it is called once for all halves of a batch (ping and pong),
so its parameters are gathered once. A pipeline stage with layers [start, stop) has the seams start
to stop, the first without its first part and the last without its second, so that a parameter has
the same name in every stage split.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from distca.model.config import ModelConfig
from distca.model.layers import QKV, After, Before
from distca.model.loss import Loss, cross_entropy


class Arriving(NamedTuple):
    """The inputs of a seam for one half of a batch; a tuple, in which FSDP finds tensors."""

    x: Tensor  # [T, hidden]; at seam 0 the tokens [T]
    positions: Tensor  # [T], each token's place in its document
    attended: Tensor | None = None  # [T, H, D] of the layer before; None at a stage's first seam
    labels: Tensor | None = None  # [T] of this rank's x, for seam L; without them: logits


class Leaving(NamedTuple):
    """The outputs of a seam for one half: q, k and v of the next layer, or a loss."""

    x: Tensor  # [T, hidden]; at seam L without labels the logits [T, vocabulary]
    qkv: QKV | None = None
    loss: Loss | None = None


EMBEDDING = "seams.0.embed.weight"
Part = Callable[[Arriving], Leaving]  # a seam on one half
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
            # Tensor parallel: each rank computes the loss of its own tokens over the whole
            # vocabulary, and the gradients of the weight are summed over ranks.
            weight = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
        return Leaving(x, loss=cross_entropy(self.norm(x), weight, labels))


class Seam(nn.Module):
    """Layer ``number - 1`` after and layer ``number`` before its attention, or the model's ends."""

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
        """Computes one half; to be called inside ``forward``, where parameters are gathered."""
        x = half.x
        if self.embed is not None:
            x = self.embed(x)
        if self.after is not None:
            assert half.attended is not None, f"the attention of layer {self.number - 1} is missing"
            x = self.after(x, half.attended)
        if self.before is not None:
            return Leaving(x, qkv=self.before(x, half.positions))
        if self.head is not None:
            return cast(Leaving, self.head(x, half.labels))
        return Leaving(x)


class Llama(nn.Module):
    """Layers [start, stop) of a model; all of them by default.

    ``seams`` maps the number of each seam, as text, to the seam.
    """

    def __init__(self, config: ModelConfig, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        stop = config.layers if stop is None else stop
        if not 0 <= start < stop <= config.layers:
            raise ValueError(
                f"layers [{start}, {stop}) of a model with {config.layers}: a stage has at least"
                f" one layer, between 0 and {config.layers}"
            )
        self.config, self.start, self.stop = config, start, stop
        self.seams = nn.ModuleDict()
        for number in range(start, stop + 1):
            enters = number > start or number == 0
            leaves = number < stop or number == config.layers
            self.seams[str(number)] = Seam(config, number, enters=enters, leaves=leaves)
        self.tie()

    def tie(self) -> None:
        """Shares the embedding's weight with a tied output head.

        Has to be called again after parameters were replaced. If embedding and head are in two
        pipeline stages, each has a copy, and the trainer sums their gradients.
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
        """Returns the name of a stage's parameter in the whole model.

        It differs only for the weight of a tied output head, which is the embedding's.
        """
        return EMBEDDING if self.config.tied and name == self.output_name else name

    @property
    def output_name(self) -> str:
        return f"seams.{self.config.layers}.head.output.weight"

    @property
    def in_order(self) -> list[Seam]:
        return [cast(Seam, seam) for seam in self.seams.values()]

    def forward(self, halves: Sequence[Arriving], walk: Walk) -> list[Leaving]:
        """Runs all halves; ``walk`` calls every seam once, in order, with attention in between.

        Seams are called from here because FSDP prepares a step in the forward of its root module.
        """
        return walk(self.in_order, list(halves))


def plainly(attend: Attend) -> Walk:
    """Returns a walk that attends after each seam, without overlap: the reference for others."""

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
    """Returns a model without memory: shard it, then ``initialize`` or ``load`` it."""
    with torch.device("meta"):
        return Llama(config, start, stop)
