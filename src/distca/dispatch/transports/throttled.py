"""A transport without peers, to measure one isolated rank: true byte counts at a given bandwidth.

One rank of a large plan runs on one device as it would among its peers: what it sends is read, what
it receives is written, and both take as long as the given link would. What arrives are random
numbers that are finite in every floating dtype, so timings are real and values are not.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distca.dispatch.transports.base import Check, Object, Records, Wait

_TRIAL_CYCLES = 20_000_000


class ThrottledTransport:
    """One isolated rank behind a link.

    bytes_per_s: bandwidth of the link, in each direction.
    latency_s: added to every all-to-all.
    """

    def __init__(
        self, rank: int, num_ranks: int, bytes_per_s: float, latency_s: float = 0.0
    ) -> None:
        if not (bytes_per_s > 0 and latency_s >= 0):
            raise ValueError(
                f"a link of {bytes_per_s} bytes/s and {latency_s} s:"
                " give a bandwidth above 0 and a latency of 0 or more"
            )
        self.rank, self.num_ranks, self.number = rank, num_ranks, 0
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s

    def seconds(self, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> float:
        """Returns the seconds of an all-to-all; both directions run at once at full speed."""
        return self.latency_s + max(sum(send_bytes), sum(recv_bytes)) / self.bytes_per_s

    def note(self, record: str, device: torch.device) -> bool:
        return False

    def announce(self, record: str) -> Callable[[], Records]:
        return lambda: [record]

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        seconds = self.seconds(send_bytes, recv_bytes)
        if send.is_cuda:
            return _start_on_stream(send, recv, seconds)
        return _start_on_host(recv, seconds)

    def all_gather_object(self, mine: Object) -> list[Object]:
        return [mine]

    def refusal(self, device: torch.device) -> str | None:
        return None


def _start_on_host(recv: Tensor, seconds: float) -> Wait:
    due = time.perf_counter() + seconds

    def wait() -> None:
        _fill(recv)
        time.sleep(max(due - time.perf_counter(), 0.0))

    return wait


def _start_on_stream(send: Tensor, recv: Tensor, seconds: float) -> Wait:
    copying, waiting = _streams(send.device)
    here = torch.cuda.current_stream(send.device)
    copying.wait_stream(here)
    waiting.wait_stream(here)
    with torch.cuda.stream(waiting):  # concurrent with the copies: the longer of the two counts
        torch.cuda._sleep(int(seconds * _cycles_per_s(send.device)))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(copying):
        _drain(send)
        _fill(recv)
    done = copying.record_event(), waiting.record_event()  # excludes what is started later

    def wait() -> None:
        now = torch.cuda.current_stream(send.device)
        for event in done:
            now.wait_event(event)

    return wait


def _fill(recv: Tensor) -> None:
    noise = _noise(recv.device)
    for part in torch.split(recv, noise.numel()):
        part.copy_(noise[: part.numel()])


def _drain(send: Tensor) -> None:
    """Reads what is sent, as a network adapter does."""
    sink = torch.empty_like(_noise(send.device))
    for part in torch.split(send, sink.numel()):
        sink[: part.numel()].copy_(part)


@lru_cache(maxsize=4)
def _noise(device: torch.device, num_bytes: int = 1 << 26) -> Tensor:
    """Returns normal bfloat16 numbers; two of them read as one float32 are finite too."""
    generator = torch.Generator(device).manual_seed(0)
    count = num_bytes // 2
    noise = torch.randn(count, device=device, dtype=torch.bfloat16, generator=generator)
    return noise.view(torch.uint8)


@lru_cache(maxsize=4)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    copying, waiting = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return copying, waiting


@lru_cache(maxsize=4)
def _cycles_per_s(device: torch.device) -> float:
    """Returns the cycles per second of the sleep kernel, measured once after a warm-up."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for _ in range(3):
            start.record()
            torch.cuda._sleep(_TRIAL_CYCLES)  # type: ignore[no-untyped-call]
            stop.record()
            stop.synchronize()
    return _TRIAL_CYCLES / (float(start.elapsed_time(stop)) / 1e3)
