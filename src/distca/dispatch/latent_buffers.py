"""Latents on the wire, keys and values in kernels: what lies between the two on one rank.

Legend: N received key rows, G key/value heads, D head size of queries and keys, V that of values, R
size of a latent, E size of the rotary part of a key, which all heads share.

What is received holds latents [N, R] and rotary parts [N, E]. It is brought into a second buffer,
in which keys [N, G, D] and values [N, G, V] lie instead, as those of a layer without latents would.
Results of the backward pass take the same way back: kernels write dk and dv, of which the gradients
of the latents are sent home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from distca.dispatch.latent import Latent
from distca.dispatch.layout import Layout, PeerRows
from distca.dispatch.moves import Move, copies
from distca.dispatch.rows import Places
from distca.dispatch.tensors import TensorSpec, wide
from distca.dispatch.wire import ALIGNMENT, ByteLayout, Messages, RowSpec, RowSpecs, sums_at_home
from distca.planning.spans import as_ints

_KEYS = (1, 2)  # the tensors of k and v in messages: latents and rotary parts on the wire

_Received = Sequence[tuple[RowSpec, Mapping[int, int]]]  # tensors, and their rows by sender


@dataclass(frozen=True, eq=False)
class LatentBuffers:
    """How one rank brings rows from what is received into what its kernels read, and back.

    here: what kernels read. home: what kernels of the backward pass write.
    matrix: where the matrix lies in what is received; None: this rank has its own. matrix_home,
        matrix_back: where its gradient lies in what is sent home, and in what comes home.
    """

    spec: TensorSpec
    here: ByteLayout
    home: ByteLayout
    num_keys: int  # N
    matrix: int | None
    matrix_home: int | None
    matrix_back: tuple[int, ...]
    unpack: Move
    pack: Move | None  # of the backward pass
    round: Move | None  # of the backward pass: own sums of dk and dv, to the dtype of tensors

    @classmethod
    def of(
        cls, layout: Layout, wire: Messages, spec: TensorSpec, *, backward: bool
    ) -> LatentBuffers:
        rows = RowSpecs.of(spec.expanded)
        q, kv = layout.q.recv, layout.kv.recv
        back: _Received = [(rows.q, q), (rows.k, kv), (rows.v, kv)]
        out = [*back, (rows.out, q), (rows.lse, q), (rows.out, q)] if backward else back
        here, home = _by_tensor(out), _by_tensor(back)
        received, sent, returned = wire.dispatch.recv, wire.combine.send, wire.combine.recv
        # The matrix is the last tensor of a dispatch, and of a combine in the backward pass.
        of_home, of_back, pack, rounded = as_ints([]), as_ints([]), None, None
        if backward:
            of_home, of_back = sent.starts[-1], returned.starts[-1]
            there, mine = _between(back, sent, home, spec)
            pack = copies(mine, there, spec.device)
            nobody, nothing = PeerRows({}, {}, moves=False), ByteLayout((), (as_ints([]),) * 3)
            own = [(row, nobody) for row, _ in back]
            rounded = sums_at_home(own, nothing, layout.num_tokens, layout.read_before[-1], spec)
        return cls(
            spec=spec,
            here=here,
            home=home,
            num_keys=sum(kv.values()),
            matrix=next(iter(received.starts[-1].tolist()), None),
            matrix_home=next(iter(of_home.tolist()), None),
            matrix_back=tuple(of_back.tolist()),
            unpack=copies(*_between(out, received, here, spec), spec.device),
            pack=pack,
            round=rounded,
        )

    def expand(self, received: Tensor, weight: Tensor) -> tuple[Tensor, Latent]:
        """Returns the bytes that kernels read, and the latents of received keys.

        weight: of this rank, which has none if it receives one.
        """
        spec = self.spec
        here = received.new_empty(self.here.num_bytes)
        latent = received.new_empty(self.num_keys, spec.latent_dim, dtype=spec.dtype)
        rotary = received.new_empty(self.num_keys, spec.rope_dim, dtype=spec.dtype)
        self.unpack([received, here, latent, rotary])
        if self.matrix is not None:
            weight = self._matrix(received, self.matrix)
        found = Latent(latent, rotary, weight)
        for rows, expanded in zip(self._keys(here, self.here), found.expand(spec), strict=True):
            rows.copy_(expanded)
        return here, found

    def contract(self, home: Tensor, latent: Latent, leaving: Tensor) -> Tensor | None:
        """Writes what is sent home; returns the gradient of the matrix, unless it is sent too.

        home: the bytes that kernels wrote. latent: of received keys, from ``expand``.
        """
        assert self.pack is not None, "gradients are sent in the backward pass"
        grads = latent.differentiate(*self._keys(home, self.home))
        self.pack([leaving, home, grads.latent, grads.rotary])
        if self.matrix_home is None:
            return grads.weight
        self._matrix(leaving, self.matrix_home).copy_(grads.weight)
        return None

    def rounded(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns sums of own tasks in the dtype of tensors, with zeros for keys without one."""
        assert self.round is not None, "gradients are summed in the backward pass"
        result = [torch.empty_like(each, dtype=self.spec.dtype) for each in (dk, dv)]
        self.round([*result, *result[:1], dk, dv, *result[:1], *result])
        return result[0], result[1]

    def sum_weights(self, own: Tensor | None, returned: Tensor) -> Tensor:
        """Returns the gradient of this rank's matrix: its own, and what servers sent home."""
        if own is not None and not self.matrix_back:
            return own
        spec = self.spec
        total = torch.zeros(spec.expansion, dtype=wide(spec.dtype), device=spec.device)
        for grad in (own, *(self._matrix(returned, start) for start in self.matrix_back)):
            if grad is not None:
                total += grad
        return total.to(spec.dtype)

    def _matrix(self, buffer: Tensor, start: int) -> Tensor:
        return RowSpec(self.spec.expansion, self.spec.dtype).view(buffer, start, 1)[0]

    def _keys(self, buffer: Tensor, layout: ByteLayout) -> list[Tensor]:
        """Returns views of all keys and of all values in a buffer."""
        rows = RowSpecs.of(self.spec.expanded)
        first = (next(iter(layout.starts[index].tolist()), 0) for index in _KEYS)
        both = zip((rows.k, rows.v), first, strict=True)
        return [row.view(buffer, start, self.num_keys) for row, start in both]


def _by_tensor(tensors: _Received) -> ByteLayout:
    """Returns a layout in which the rows of all senders lie together, tensor after tensor."""
    starts, offset = [], 0
    for row, num_rows in tensors:
        *before, end = accumulate((n * row.num_bytes for n in num_rows.values()), initial=offset)
        starts.append(as_ints(before))
        offset = -(-end // ALIGNMENT) * ALIGNMENT
    return ByteLayout((offset,), tuple(starts))


def _between(
    tensors: _Received, wire: ByteLayout, expanded: ByteLayout, spec: TensorSpec
) -> tuple[Places, Places]:
    """Returns the places of rows in what travels, and where they lie on this rank.

    Memories are what travels, the expanded buffer, all latents, and all rotary parts.
    """
    of_wire = RowSpecs.of(spec)
    there, here = [], []
    for index, (row, num_rows) in enumerate(tensors):
        count = as_ints(list(num_rows.values()))
        if index in _KEYS:
            row = (of_wire.k, of_wire.v)[index - 1]
            here.append(Places.packed(1 + index, 0, count * row.num_bytes))
        else:
            size = count * row.num_bytes
            here.append(Places(np.ones_like(size), expanded.starts[index], size))
        there.append(Places(np.zeros_like(count), wire.starts[index], count * row.num_bytes))
    return Places.joined(there), Places.joined(here)
