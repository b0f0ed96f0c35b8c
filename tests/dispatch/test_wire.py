"""Messages between all ranks of one process: every part arrives as it was written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Draw
from torch import Tensor

from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.dispatch.wire import ALIGNMENT, ByteLayout, RowSpec
from distca.planning.spans import Ints, as_ints

Parts = list[list[Tensor]]


@dataclass(frozen=True)
class Traveling:
    """One tensor of a message, on all ranks."""

    spec: RowSpec
    rows: Ints  # [sender, receiver]

    def values(self) -> list[list[Tensor]]:
        """Random rows by sender and receiver."""
        shape, dtype = self.spec
        return [[torch.randn(count, *shape).to(dtype) for count in row] for row in self.rows]


@st.composite
def messages(draw: Draw) -> list[Traveling]:
    """A few tensors; any rank may send nothing to any other, or to itself."""
    ranks = draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([0, 0, 1, 3, 20]), min_size=ranks, max_size=ranks)
    spec = st.builds(
        RowSpec,
        shape=st.sampled_from([(), (3,), (2, 5), (4, 16)]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    )
    rows = st.lists(row, min_size=ranks, max_size=ranks).map(as_ints)
    return draw(st.lists(st.builds(Traveling, spec=spec, rows=rows), min_size=1, max_size=4))


def sides(tensors: list[Traveling]) -> list[tuple[ByteLayout, ByteLayout]]:
    """What each rank sends and receives."""
    ranks, specs = len(tensors[0].rows), [tensor.spec for tensor in tensors]

    def side(rows: list[Ints]) -> ByteLayout:
        counts = [{rank: int(n) for rank, n in enumerate(row) if n} for row in rows]
        return ByteLayout.of(specs, counts, ranks)

    return [
        (side([t.rows[rank] for t in tensors]), side([t.rows[:, rank] for t in tensors]))
        for rank in range(ranks)
    ]


def views(side: ByteLayout, tensors: list[Traveling], rows: list[Ints], buffer: Tensor) -> Parts:
    """The rows of each tensor, of those ranks that have any."""
    return [
        [
            tensor.spec.view(buffer, start, count)
            for start, count in zip(starts.tolist(), of_rank[of_rank > 0].tolist(), strict=True)
        ]
        for tensor, starts, of_rank in zip(tensors, side.starts, rows, strict=True)
    ]


@given(messages())
def test_what_peers_write_arrives(tensors: list[Traveling]) -> None:
    layouts = sides(tensors)
    values = [tensor.values() for tensor in tensors]

    def one_rank(transport: LocalTransport) -> list[list[Tensor]]:
        sent, received = layouts[transport.rank]
        send, recv = (torch.empty(x.num_bytes, dtype=torch.uint8) for x in (sent, received))
        rows = [tensor.rows[transport.rank] for tensor in tensors]
        for value, parts in zip(values, views(sent, tensors, rows, send), strict=True):
            leaving = [part for part in value[transport.rank] if len(part)]
            for part, rows in zip(parts, leaving, strict=True):
                part.copy_(rows)
        transport.start(send, recv, sent.rank_bytes, received.rank_bytes)()
        rows = [tensor.rows[:, transport.rank] for tensor in tensors]
        return views(received, tensors, rows, recv)

    for rank, arrived in enumerate(LocalWorld(len(layouts)).run(one_rank)):
        for value, parts in zip(values, arrived, strict=True):
            expected = [row[rank] for row in value if len(row[rank])]
            for part, rows in zip(parts, expected, strict=True):
                assert part.dtype == rows.dtype
                assert torch.equal(part, rows)


@given(messages())
def test_sender_and_receiver_count_the_same_bytes(tensors: list[Traveling]) -> None:
    layouts = sides(tensors)
    sent = np.array([send.rank_bytes for send, _ in layouts])
    received = np.array([recv.rank_bytes for _, recv in layouts])
    assert np.array_equal(sent, received.T)
    assert [send.num_bytes for send, _ in layouts] == sent.sum(axis=1).tolist()
    assert [recv.num_bytes for _, recv in layouts] == received.sum(axis=1).tolist()


@given(messages())
def test_every_part_starts_at_a_boundary_inside_the_buffer(tensors: list[Traveling]) -> None:
    for rank, (send, recv) in enumerate(sides(tensors)):
        for index, tensor in enumerate(tensors):
            for side, rows in ((send, tensor.rows[rank]), (recv, tensor.rows[:, rank])):
                starts, stops = side.starts[index], rows[rows > 0] * tensor.spec.num_bytes
                assert not (starts % ALIGNMENT).any()
                assert bool((starts >= 0).all())
                assert bool((starts + stops <= side.num_bytes).all())


def test_by_hand() -> None:
    """Rank 0 is sent 30 bytes and rank 1 136, of one tensor each, up to the next boundary."""
    specs = [RowSpec((5,), torch.bfloat16), RowSpec((), torch.float64)]
    send = ByteLayout.of(specs, [{0: 3}, {1: 17}], 2)
    assert send.rank_bytes == (128, 256)
    assert [starts.tolist() for starts in send.starts] == [[0], [128]]
    shapes = [tuple(spec.view(torch.empty(384, dtype=torch.uint8), 128, 3).shape) for spec in specs]
    assert shapes == [(3, 5), (3,)]
    assert ByteLayout.of(specs, [{}, {1: 1}], 2).rank_bytes == (0, 128)
    assert [starts.tolist() for starts in ByteLayout.of(specs, [{}, {}], 2).starts] == [[], []]
