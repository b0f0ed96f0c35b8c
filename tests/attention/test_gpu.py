"""What needs a GPU: streams, half-precision kernels, NCCL, memory, no synchronization.

Run where there is one: ``pytest -m gpu tests/attention``. flash-attn-4 is tried where installed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from attention.bodies import Model, attend
from attention.test_exact import on_all_ranks
from attention.tokens import SCALE, Tokens, errors
from strategies import Batch, Entry
from torch import Tensor

from distca.attention.backends.base import Saved, Traits
from distca.attention.backends.choice import backends
from distca.attention.core import CoreAttention
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Check, Wait
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.planning.masks import Mask
from distca.planning.plan import Plan

pytestmark = pytest.mark.gpu
HEADS = (8, 2, 64)
DOCUMENTS = [[1500], [640, 70, 1], [], [500, 331]]


@pytest.fixture(params=["fa4", "flash", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that takes bfloat16 on this machine."""
    like = torch.empty(1, *HEADS[::2], dtype=torch.bfloat16, device="cuda")
    traits = Traits.of(
        TensorSpec.of(like, *[like[:, : HEADS[1]]] * 2), [Mask.parse("causal")], deterministic=True
    )
    chosen = next(b for b in backends() if b.name == request.param)
    if refusal := chosen.refusal(traits):
        pytest.skip(refusal)
    return chosen.name


@pytest.mark.parametrize("backend", ["fa4"], indirect=True)
def test_calls_of_short_tasks_compile_nothing_of_their_own(backend: str) -> None:
    from flash_attn.cute import interface

    caches = [interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache]
    known = []
    for lengths in ([1500, 70], [70, 1], [130], [600, 400]):
        plan = plan_of([[*lengths]])
        tokens = Tokens(plan, torch.bfloat16, HEADS)
        on_all_ranks(plan, tokens, backend, "steps", "cuda")
        known.append([len(cache.cache) for cache in caches])
    assert known == known[:1] * len(known)


@pytest.mark.parametrize("backend", ["fa4"], indirect=True)
def test_preparing_compiles_what_layers_need(backend: str) -> None:
    from flash_attn.cute import interface

    caches = [interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache]
    for cache in caches:
        cache.cache.clear()
    plan = plan_of([[1500, 70]], mask=["causal", "window:300"])
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend=backend)
    heads, kv_heads, head_dim = HEADS
    spec = TensorSpec(heads, kv_heads, head_dim, head_dim, torch.bfloat16, torch.device("cuda", 0))
    attention.prepare(spec, forward=plan, backward=plan)
    known = [len(cache.cache) for cache in caches]
    assert min(known) > 0
    on_all_ranks(plan, Tokens(plan, torch.bfloat16, HEADS), backend, "steps", "cuda")
    assert [len(cache.cache) for cache in caches] == known


def plan_of(documents: list[list[Entry]], **options: object) -> Plan:
    return Batch(documents).plan(cost="pairs", **options)


@pytest.mark.parametrize("mask", ["causal", "full", "window:300", "chunk:300", "band:150"])
def test_bfloat16_is_within_the_error_of_one_device(backend: str, mask: str) -> None:
    alone = [[length for rank in DOCUMENTS for length in rank]]
    found, whole = (
        errors(on_all_ranks(plan, tokens, backend, "steps", "cuda"), tokens.expected())
        for plan, tokens in (
            (plan, Tokens(plan, torch.bfloat16, HEADS))
            for plan in (plan_of(DOCUMENTS, mask=mask), plan_of(alone, mask=mask))
        )
    )
    for name, error in found.items():  # what travels is rounded once more
        assert error <= 1.25 * whole[name] + 1e-3, f"{name}: {error:.1e}, alone {whole[name]:.1e}"
        assert whole[name] < 1e-2


@pytest.mark.parametrize("mask", ["causal", "window:300"])
def test_two_way_spans_are_near_the_error_of_one_causal_device(backend: str, mask: str) -> None:
    """Images and a prefix, cut and moved; two kernels' results are rounded before the merge."""
    two_way = [[{"length": 1500, "two_way": [[10, 700], [700, 956], [1100, 1400]]}], [300],
               [{"length": 90, "two_way": [[0, 64]]}, 40]]  # fmt: skip
    found, causal = (
        errors(on_all_ranks(plan, tokens, backend, "steps", "cuda"), tokens.expected())
        for plan, tokens in (
            (plan, Tokens(plan, torch.bfloat16, HEADS))
            for plan in (
                plan_of(two_way, mask=mask),
                plan_of([[1500, 300, 90, 40]], mask=mask),
            )
        )
    )
    for name, error in found.items():
        assert error <= 1.6 * causal[name] + 1e-3, f"{name}: {error:.1e}, causal {causal[name]:.1e}"


def test_sinks(backend: str) -> None:
    plan = plan_of([[700, 1, 90]])
    tokens = Tokens(plan, torch.bfloat16, HEADS, sinks=True)
    found = errors(on_all_ranks(plan, tokens, backend, "op", "cuda"), tokens.expected())
    assert max(found.values()) < 2e-2, found


def test_gradients_are_bitwise_equal_from_run_to_run_and_documents_do_not_leak(
    backend: str,
) -> None:
    plan = plan_of(DOCUMENTS)
    tokens = Tokens(plan, torch.bfloat16, HEADS)
    before, again = (on_all_ranks(plan, tokens, backend, "steps", "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    changed = tokens.document(0)  # the long one, whose tasks are everywhere
    for tensor in (tokens.q, tokens.k, tokens.v, tokens.grad_out):
        tensor[changed] = tensor[changed] * -3 + 1
    after = on_all_ranks(plan, tokens, backend, "steps", "cuda")
    others = torch.ones(len(tokens.q), dtype=torch.bool)
    others[changed] = False
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[others], now[others])
        assert not torch.equal(was[changed], now[changed])


class Delayed(LocalTransport):
    """Sends and receives late, on a stream of its own, into a buffer that first holds NaN."""

    def __init__(self, inner: LocalTransport) -> None:
        super().__init__(inner.world, inner.rank)
        self.stream = torch.cuda.Stream()

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            recv.fill_(255)  # NaN in every floating dtype
            torch.cuda._sleep(20_000_000)  # about 10 ms
            leaving = send.clone()  # late, to notice a buffer that is overwritten too early
            sent = torch.cuda.Event()
            sent.record()
        parts = [(part, sent) for part in torch.split(leaving, list(send_bytes))]
        collective = self._post(parts)

        def wait() -> None:
            if check is not None:
                check()
            arrived = self.world.collect(collective, self.rank)
            with torch.cuda.stream(self.stream):
                for _, event in arrived:
                    self.stream.wait_event(event)
                torch.cuda._sleep(20_000_000)
                torch.cat([part for part, _ in arrived], out=recv)
            torch.cuda.current_stream().wait_stream(self.stream)
            for part, _ in arrived:
                part.record_stream(self.stream)

        return wait


def test_a_late_exchange_into_poisoned_buffers_gives_the_same_bits(backend: str) -> None:
    plan = plan_of(DOCUMENTS)
    tokens = Tokens(plan, torch.bfloat16, HEADS)

    def rank(transport: LocalTransport) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            attention = CoreAttention(
                transport=Delayed(transport), backend=backend, scale=SCALE, deterministic=True
            )
            for _ in range(2):  # the second time, buffers hold what the first left
                found = attend(attention, plan, tokens, face="steps", device="cuda")
            torch.cuda.synchronize()
            return found

    right = on_all_ranks(plan, tokens, backend, "steps", "cuda")
    late = tokens.gathered(LocalWorld(4).run(rank))
    assert all(torch.equal(a, b) for a, b in zip(right, late, strict=True))


def one_of_eight(rank: int, seed: int = 0) -> Plan:
    draw = random.Random(seed)
    lengths = [[draw.randint(4000, 9000)], *([draw.randint(1, 700)] * 3 for _ in range(7))]
    return plan_of(lengths)


def step(attention: CoreAttention, plan: Plan) -> None:
    tokens = int(plan.placement.tokens[attention.transport.rank])
    q, k, v = (
        torch.randn(tokens, heads, HEADS[2], dtype=torch.bfloat16, device="cuda").requires_grad_()
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    )
    attention(q, k, v, plan).sum().backward()


@pytest.mark.parametrize("rank", [0, 3])
def test_memory_is_flat_over_fifty_changing_plans(rank: int) -> None:
    attention = CoreAttention(
        transport=ThrottledTransport(rank, 8, 1e12), backend="flash", buffer_bytes=1 << 26
    )
    allocated = []
    for seed in range(50):
        plan = one_of_eight(rank, seed)
        step(attention, plan)
        del plan
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[1:])) == 1, allocated


def test_nothing_synchronizes_with_the_device() -> None:
    plan = one_of_eight(0)
    attention = CoreAttention(transport=ThrottledTransport(0, 8, 1e12), backend="flash")
    step(attention, plan)  # the first call prepares the plan and grows the buffers
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(attention, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_throttled_exchange_takes_its_time() -> None:
    transport = ThrottledTransport(0, 2, bytes_per_s=1e9, latency_s=1e-3)
    send, recv = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (4_000_000, 9_000_000))
    transport.start(send, recv, [0, 4_000_000], [0, 9_000_000])()  # calibrates
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    transport.start(send, recv, [0, 4_000_000], [0, 9_000_000])()
    stop.record()
    stop.synchronize()
    assert 9.5 < start.elapsed_time(stop) < 15  # 10 ms, on a clock that moves a little
    assert torch.isfinite(recv.view(torch.bfloat16)).all()


@pytest.fixture
def nccl() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_one_rank_of_nccl_is_the_bare_kernel(backend: str) -> None:
    plan = plan_of([[1500, 640, 70, 1]])
    tokens = Tokens(plan, torch.bfloat16, HEADS)
    attention = CoreAttention(backend=backend, scale=SCALE, deterministic=True)
    found = [t.cpu() for t in attend(attention, plan, tokens, device="cuda")]
    q, k, v, grad_out = (t.cuda() for t in tokens.of_rank(0))
    prepared = attention.prepare(TensorSpec.of(q, k, v), forward=plan)
    assert prepared.forward is not None
    assert prepared.forward.layout.is_one_call
    call = prepared.forward.local[0].packed
    bare = prepared.backend.forward(q, k, v, call, SCALE)
    saved = Saved(q, k, v, *bare)
    grads = prepared.backend.backward(grad_out, saved, call, SCALE, deterministic=True)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(found, (bare.out, *grads), strict=True))


@pytest.mark.usefixtures("nccl")
def test_cpu_tensors_are_refused_by_nccl() -> None:
    plan = plan_of([[30]])
    with pytest.raises(ValueError, match="does not move cpu tensors"):
        attend(CoreAttention(), plan, Tokens(plan, torch.float32))


@pytest.mark.usefixtures("nccl")
def test_a_compiled_model_gives_the_same_gradients() -> None:
    plan = plan_of([[300, 70, 1]])
    x = torch.randn(371, 32, device="cuda")
    grads = []
    for wrap in (lambda model: model, torch.compile):
        model = Model(CoreAttention(backend="sdpa")).cuda()
        run: Callable[..., Tensor] = wrap(model)
        run(x, plan).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*grads, strict=True):
        assert torch.allclose(plain, compiled, rtol=1e-4, atol=1e-5)
