"""Messages between all ranks of one process: every part arrives as it was put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Draw
from torch import Tensor

from distca.dispatch.transports.local import LocalHub, LocalTransport
from distca.dispatch.wire import ALIGNMENT, Lane, Message
from distca.planning.spans import Ints, as_ints


@dataclass(frozen=True)
class Freight:
    """One lane of all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Ints  # [sender, receiver]

    def lane(self, rank: int) -> Lane:
        return Lane.of(self.shape, self.dtype, self.rows[rank], self.rows[:, rank])

    def load(self) -> list[list[Tensor]]:
        """By sender and receiver."""
        return [
            [torch.randn(count, *self.shape).to(self.dtype) for count in row] for row in self.rows
        ]


@st.composite
def freights(draw: Draw) -> list[Freight]:
    """A few lanes; any rank may send nothing to any, itself included."""
    ranks = draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([0, 0, 1, 3, 20]), min_size=ranks, max_size=ranks)
    lane = st.builds(
        Freight,
        shape=st.sampled_from([(), (3,), (2, 5), (4, 16)]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
        rows=st.lists(row, min_size=ranks, max_size=ranks).map(as_ints),
    )
    return draw(st.lists(lane, min_size=1, max_size=4))


def messages_of(freight: list[Freight]) -> list[Message]:
    return [
        Message(tuple(lane.lane(rank) for lane in freight)) for rank in range(len(freight[0].rows))
    ]


@given(freights())
def test_what_peers_put_arrives(freight: list[Freight]) -> None:
    messages = messages_of(freight)
    loads = [lane.load() for lane in freight]

    def one_rank(transport: LocalTransport) -> list[list[Tensor]]:
        outbox, inbox = messages[transport.rank].outbox, messages[transport.rank].inbox
        send, recv = (torch.empty(box.num_bytes, dtype=torch.uint8) for box in (outbox, inbox))
        for load, parts in zip(loads, outbox.open(send), strict=True):
            leaving = [part for part in load[transport.rank] if len(part)]
            for part, rows in zip(parts, leaving, strict=True):
                part.copy_(rows)
        transport.start(send, recv, outbox.bytes_of_peer, inbox.bytes_of_peer)()
        return inbox.open(recv)

    for rank, arrived in enumerate(LocalHub(len(messages)).run(one_rank)):
        for load, parts in zip(loads, arrived, strict=True):
            expected = [row[rank] for row in load if len(row[rank])]
            for part, rows in zip(parts, expected, strict=True):
                assert part.dtype == rows.dtype
                assert torch.equal(part, rows)


@given(freights())
def test_sender_and_receiver_count_the_same_bytes(freight: list[Freight]) -> None:
    messages = messages_of(freight)
    sent = np.array([message.outbox.bytes_of_peer for message in messages])
    received = np.array([message.inbox.bytes_of_peer for message in messages])
    assert np.array_equal(sent, received.T)
    assert [message.outbox.num_bytes for message in messages] == sent.sum(axis=1).tolist()
    assert [message.inbox.num_bytes for message in messages] == received.sum(axis=1).tolist()


@given(freights())
def test_every_part_starts_at_a_boundary_inside_the_buffer(freight: list[Freight]) -> None:
    for message in messages_of(freight):
        for box in (message.outbox, message.inbox):
            buffer = torch.empty(box.num_bytes, dtype=torch.uint8)
            for part in (part for parts in box.open(buffer) for part in parts):
                offset = part.data_ptr() - buffer.data_ptr()
                assert offset % ALIGNMENT == 0
                assert 0 <= offset <= box.num_bytes - part.nbytes


@given(freights())
def test_the_way_back_is_the_way_there_turned_round(freight: list[Freight]) -> None:
    for message in messages_of(freight):
        back = Message(tuple(lane.returning() for lane in message.lanes))
        assert back.outbox.bytes_of_peer == message.inbox.bytes_of_peer
        assert back.inbox.bytes_of_peer == message.outbox.bytes_of_peer


def test_the_way_back_may_have_another_dtype() -> None:
    lane = Lane((4,), torch.bfloat16, send_rows=(1, 0), recv_rows=(2, 3))
    assert lane.returning(torch.float32) == Lane((4,), torch.float32, (2, 3), (1, 0))


def test_by_hand() -> None:
    """Peer 0 is sent 30 bytes and peer 1 136: in one lane each, up to the next boundary."""
    narrow = Lane((5,), torch.bfloat16, send_rows=(3, 0), recv_rows=(0, 0))
    single = Lane((), torch.float64, send_rows=(0, 17), recv_rows=(0, 1))
    message = Message((narrow, single))
    assert message.outbox.bytes_of_peer == [128, 256]
    assert message.inbox.bytes_of_peer == [0, 128]
    parts = message.outbox.open(torch.empty(384, dtype=torch.uint8))
    assert [[tuple(part.shape) for part in lane] for lane in parts] == [[(3, 5)], [(17,)]]
