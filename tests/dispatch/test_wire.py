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


@given(messages())
def test_what_peers_write_arrives(tensors: list[Traveling]) -> None:
    layouts = sides(tensors)
    values = [tensor.values() for tensor in tensors]

    def one_rank(transport: LocalTransport) -> list[list[Tensor]]:
        sent, received = layouts[transport.rank]
        send, recv = (torch.empty(x.num_bytes, dtype=torch.uint8) for x in (sent, received))
        for value, parts in zip(values, sent.views(send), strict=True):
            leaving = [part for part in value[transport.rank] if len(part)]
            for part, rows in zip(parts, leaving, strict=True):
                part.copy_(rows)
        transport.start(send, recv, sent.rank_bytes, received.rank_bytes)()
        return received.views(recv)

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
    for side in (side for pair in sides(tensors) for side in pair):
        buffer = torch.empty(side.num_bytes, dtype=torch.uint8)
        for part in (part for parts in side.views(buffer) for part in parts):
            offset = part.data_ptr() - buffer.data_ptr()
            assert offset % ALIGNMENT == 0
            assert 0 <= offset <= side.num_bytes - part.nbytes


def test_by_hand() -> None:
    """Rank 0 is sent 30 bytes and rank 1 136, of one tensor each, up to the next boundary."""
    specs = [RowSpec((5,), torch.bfloat16), RowSpec((), torch.float64)]
    send = ByteLayout.of(specs, [{0: 3}, {1: 17}], 2)
    assert send.rank_bytes == (128, 256)
    parts = send.views(torch.empty(384, dtype=torch.uint8))
    assert [[tuple(part.shape) for part in tensor] for tensor in parts] == [[(3, 5)], [(17,)]]
    assert ByteLayout.of(specs, [{}, {1: 1}], 2).rank_bytes == (0, 128)
    assert ByteLayout.of(specs, [{}, {}], 2).views(torch.empty(0, dtype=torch.uint8)) == [[], []]
