"""A Llama-family decoder without its core attention: a sequence of seams.

    seam 0        embedding                            and  layer 0 before its attention
    seam l        layer l - 1 after its attention      and  layer l before its attention
    seam L        layer L - 1 after its attention      and  final norm, output head, loss

Between two seams is the core attention of one layer. It has no weights, and the caller provides it.
A seam is the unit of sharding: it is called once for all halves of a batch (ping and pong), so its
parameters are gathered once. A pipeline stage with layers [start, stop) has the seams start to
stop, the first without its left column and the last without its right one, so that a parameter has
the same name in every stage split.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from distca.model.config import ModelConfig
from distca.model.layers import QKV, After, Before
from distca.model.loss import Loss, cross_entropy


class Pending(Protocol):
    """The attention of one layer and half in progress."""

    def compute(self) -> None: ...

    def combine(self) -> Tensor:
        """Returns the output [T, H, D]."""
        ...


Dispatch = Callable[[int, int, Tensor, Tensor, Tensor], Pending]  # layer, half, q, k, v
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v -> [T, H, D]
EMBEDDING = "seams.0.embed.weight"


class Arriving(NamedTuple):
    """The inputs of a seam for one half of a batch; a tuple, in which FSDP finds tensors."""

    x: Tensor  # [T, hidden]; at seam 0 the tokens [T]
    positions: Tensor  # [T], each token's place in its document
    labels: Tensor | None = None  # [T] of this rank's x, for seam L; without them: logits
    attention: Pending | None = None  # of the layer before; None at a stage's first seam


class Leaving(NamedTuple):
    """The outputs of a seam for one half: q, k and v of the next layer, or a loss.

    q, k and v are among them, although they are dispatched already, because FSDP gathers a seam's
    parameters for the backward pass when the gradient of one of its outputs is computed.
    """

    x: Tensor  # [T, hidden]; at seam L without labels the logits [T, vocabulary]
    qkv: QKV | None = None
    loss: Loss | None = None
    attention: Pending | None = None  # of the next layer


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
        self, halves: Sequence[Arriving], dispatch: Dispatch, *, recompute: bool = False
    ) -> list[Leaving]:
        """Runs all halves one after the other: combine, linear layers, dispatch.

        recompute: checkpoints the linear layers. Dispatch and combine stay outside of the
            checkpointed region; inside, they would exchange again in the backward pass. So does the
            head, whose loss keeps no logits anyway, and would compute them once more.
        """
        results = []
        for number, half in enumerate(halves):
            attended = None if half.attention is None else half.attention.combine()
            half = half._replace(attention=None)
            if recompute and torch.is_grad_enabled():
                leaving: Leaving = checkpoint(self.linear, half, attended, use_reentrant=False)
            else:
                leaving = self.linear(half, attended)
            if self.head is not None:
                leaving = self.head(leaving.x, half.labels)
            if leaving.qkv is not None:
                pending = dispatch(self.number, number, *leaving.qkv)
                leaving = leaving._replace(attention=pending)
            results.append(leaving)
        return results

    def linear(self, half: Arriving, attended: Tensor | None) -> Leaving:
        """Runs the linear layers of one half; called inside ``forward``, with gathered parameters.

        attended: the output [T, H, D] of the attention of the layer before.
        """
        x = half.x
        if self.embed is not None:
            x = self.embed(x)
        if self.after is not None:
            x = self.after(x, attended)
        return Leaving(x, qkv=None if self.before is None else self.before(x, half.positions))


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
        first, last = self.seam_list[0], self.seam_list[-1]
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
    def seam_list(self) -> list[Seam]:
        return [cast(Seam, seam) for seam in self.seams.values()]

    def forward(
        self, halves: Sequence[Arriving], dispatch: Dispatch, *, recompute: bool = False
    ) -> list[Leaving]:
        """Runs all halves through all seams, in the order of ``distca.pipeline.tick_program``."""
        for seam in self.seam_list:
            results: list[Leaving] = seam(halves, dispatch, recompute=recompute)
            for leaving in results:
                if leaving.attention is not None:
                    leaving.attention.compute()
            halves = [
                half._replace(x=leaving.x, attention=leaving.attention)
                for half, leaving in zip(halves, results, strict=True)
            ]
        return results


def plainly(attend: Attend) -> Dispatch:
    """Returns a dispatch whose attention runs between seams, without overlap: the reference."""
    return lambda layer, half, q, k, v: _Plain(partial(attend, layer, q, k, v))


class _Plain:
    def __init__(self, attend: Callable[[], Tensor]) -> None:
        self._attend = attend

    def compute(self) -> None:
        self._out = self._attend()

    def combine(self) -> Tensor:
        return self._out


def on_meta(config: ModelConfig, start: int = 0, stop: int | None = None) -> Llama:
    """Returns a model without memory: shard it, then ``initialize`` or ``load`` it."""
    with torch.device("meta"):
        return Llama(config, start, stop)
