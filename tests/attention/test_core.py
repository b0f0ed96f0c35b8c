"""CoreAttention in autograd: checkpointing, lifetime, memory, frozen inputs, errors, serving."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention.bodies import FACES, attend
from attention.tokens import SCALE, Tokens, assert_exact
from strategies import Batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from distca.attention import op
from distca.attention.core import CoreAttention
from distca.attention.inputs import Inputs
from distca.dispatch.agreement import DisagreementError
from distca.dispatch.transports.base import Records, Wait
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.planning.plan import Plan


class Counting(LocalTransport):
    """Counts its exchanges."""

    def __init__(self, inner: LocalTransport) -> None:
        super().__init__(inner.world, inner.rank)
        self.exchanges = 0

    def start(self, *message: Any) -> Wait:
        self.exchanges += 1
        return super().start(*message)


class Late(LocalTransport):
    """Compares messages later, as on a GPU; counts the answers that its rank has waited for."""

    def __init__(self, inner: LocalTransport) -> None:
        super().__init__(inner.world, inner.rank)
        self.answers = 0

    def note(self, record: str, device: torch.device) -> bool:
        super().announce(record)
        return True

    def announce(self, record: str) -> Callable[[], Records]:
        self.answers += 1
        return super().announce(record)


def three_ranks(**options: object) -> Plan:
    return Batch([[301], [64, 7, 1], []], {"tile": 16, "min_shard": 16}).plan(**options)


def leaves(tokens: Tokens, rank: int) -> list[Tensor]:
    return [t.requires_grad_() for t in tokens.of_rank(rank)[:3]]


def exchanges_of(plan: Plan, layer: Callable[[CoreAttention, list[Tensor]], Tensor]) -> list[int]:
    """Returns the collectives of each rank in a forward and backward of the layer."""
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> int:
        counting = Counting(transport)
        attention = CoreAttention(transport=counting, backend="reference")
        layer(attention, leaves(tokens, transport.rank)).sum().backward()
        return counting.exchanges

    return LocalWorld(plan.devices.num_ranks).run(rank)


def test_selective_checkpointing_exchanges_once() -> None:
    plan = three_ranks()
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.distca.core_attention.default])

    def layer(attention: CoreAttention, qkv: list[Tensor]) -> Tensor:
        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q * 2, k * 2, v * 2, plan).sin()

        return checkpoint(block, *qkv, use_reentrant=False, context_fn=saved)

    assert exchanges_of(plan, layer) == [4, 4, 4]  # dispatch and combine, forward and backward


def test_no_collective_where_nothing_moves() -> None:
    even = Batch([[40], [40], [40]], {"tile": 16, "min_shard": 16}).plan()
    assert exchanges_of(even, lambda attention, qkv: attention(*qkv, even)) == [0, 0, 0]
    keys_only = Batch([[500, 9], [64, 7, 1], [40]], {"tile": 16, "min_shard": 16}).plan(
        placement="balanced"
    )
    assert not len(keys_only.forward.moved)
    assert keys_only.traffic.total
    # No output goes home, so forward has no combine.
    assert exchanges_of(keys_only, lambda attention, qkv: attention(*qkv, keys_only)) == [3] * 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_full_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> list[Tensor]:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        qkv = leaves(tokens, transport.rank)
        out = checkpoint(lambda *x: attention(*x, plan), *qkv, use_reentrant=reentrant)
        out.backward(tokens.of_rank(transport.rank)[3])
        return [out.detach(), *(t.grad for t in qkv if t.grad is not None)]

    assert_exact(tokens.gathered(LocalWorld(3).run(rank)), tokens.expected(), torch.float64)


def test_a_prepared_plan_lives_until_its_last_backward() -> None:
    plan = Batch([[40, 3]], {"tile": 16, "min_shard": 16}).plan()
    tokens = Tokens(plan, torch.float64)
    gc.collect()
    before = len(op._PREPARED)

    def rank(transport: LocalTransport) -> None:
        inputs = leaves(tokens, 0)
        out = CoreAttention(transport=transport)(*inputs, plan)
        gc.collect()
        assert len(op._PREPARED) == before + 1  # the graph holds it, the module is gone
        out.sum().backward()
        assert inputs[0].grad is not None

    LocalWorld(1).run(rank)
    gc.collect()
    assert len(op._PREPARED) == before


def test_tensors_do_not_wait_for_the_garbage_collector() -> None:
    """They would stay on the device until Python finds the cycle that holds them."""

    def step() -> None:
        plan = three_ranks()
        tokens = Tokens(plan, torch.float32)

        def rank(transport: LocalTransport) -> None:
            attend(CoreAttention(transport=transport, backend="reference"), plan, tokens)

        LocalWorld(3).run(rank)

    step()  # makes what lives as long as the process
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("capacity", [None, 1 << 20])
def test_memory_is_flat_over_changing_plans(capacity: int | None) -> None:
    draw, grain = random.Random(0), {"tile": 4, "min_shard": 4, "cost": "pairs"}
    plans = [
        Batch([[draw.randint(100, 300)], [draw.randint(1, 40)] * 3], grain).plan()
        for _ in range(25)
    ]
    assert len({plan.traffic.total for plan in plans}) > 20

    def rank(transport: LocalTransport) -> list[int]:
        attention = CoreAttention(
            transport=transport, backend="reference", scale=SCALE, buffer_bytes=capacity
        )
        sizes = []
        for plan in plans * 2:
            attend(attention, plan, Tokens(plan, torch.float32))
            sizes.append(attention.buffers.nbytes)
        return sizes

    for sizes in LocalWorld(2).run(rank):
        assert len(sizes) == 50
        flat = sizes[25:] if capacity is None else sizes  # grown, or allocated at first use
        assert len(set(flat)) == 1


def test_results_do_not_lie_in_the_buffers() -> None:
    """A later exchange must not change what an earlier one returned or saved."""
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        found = attend(attention, plan, tokens)
        kept = [t.clone() for t in found]
        other = Tokens(plan, torch.float64)
        for tensor in (other.q, other.k, other.v, other.grad_out):
            tensor.mul_(-2)
        attend(attention, plan, other)
        for memory in attention.buffers._memory.values():
            memory.fill_(255)  # NaN in every floating dtype
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))

    LocalWorld(3).run(rank)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "wanted",
    [
        [(True, False, False)] * 3,
        [(False, True, True)] * 3,
        [(True, True, True), (False, False, False), (False, True, False)],
        [(False, False, False)] * 3,
    ],
    ids=["q", "k and v", "none on one rank", "none"],
)
def test_frozen_inputs(wanted: list[tuple[bool, bool, bool]], face: str) -> None:
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> list[Tensor]:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        return attend(attention, plan, tokens, face=face, wanted=wanted[transport.rank])

    exact = tokens.expected()
    for number in range(3):
        for grad, want in zip(exact[1:], wanted[number], strict=True):
            grad[tokens.rows(number)] *= want
    assert_exact(tokens.gathered(LocalWorld(3).run(rank)), exact, torch.float64)


@pytest.mark.parametrize(
    ("last", "wanted", "answers"),
    [
        ([30], [True, True, True], [0, 0, 0]),
        ([30], [True, False, True], [0, 1, 0]),  # it joins the backward exchange of the others
        ([], [True, True, True], [1, 1, 1]),  # which might serve
    ],
    ids=["all want gradients", "one does not", "one has no tokens"],
)
def test_the_next_plan_waits_only_for_answers_that_it_needs(
    last: list[int], wanted: list[bool], answers: list[int]
) -> None:
    """A host that waits for other ranks no longer launches ahead of its device."""
    before = three_ranks()
    plan = Batch([[301], [64, 7, 1], last], {"tile": 16, "min_shard": 16}).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> tuple[list[Tensor], int]:
        late = Late(transport)
        attention = CoreAttention(transport=late, backend="reference", scale=SCALE)
        attend(attention, before, Tokens(before, torch.float64))
        assert late.answers == 1
        wants = [wanted[late.rank]] * 3
        return attend(attention, plan, tokens, wanted=wants), late.answers - 1

    found, waited = zip(*LocalWorld(3).run(rank), strict=True)
    exact = tokens.expected()
    for number in range(3):
        for grad in exact[1:]:
            grad[tokens.rows(number)] *= wanted[number]
    assert_exact(tokens.gathered(list(found)), exact, torch.float64)
    assert list(waited) == answers


def test_servers_serve_layer_after_layer() -> None:
    """Two steps of three layers, the first of them frozen, then an evaluation without backward."""
    plan = Batch([[301], [64, 7]], {"tile": 16, "min_shard": 16}).plan(servers=2)
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> list[int]:
        counting = Counting(transport)
        attention = CoreAttention(transport=counting, backend="reference")
        counts = []
        for grad in (True, True, False):
            if transport.rank >= 2:
                attention.serve(plan, layers=3, backward=2 * grad)
            else:
                q, k, v = tokens.of_rank(transport.rank)[:3]
                with torch.set_grad_enabled(grad):
                    x = attention(q, k, v, plan)
                    for _ in range(2):
                        x = attention(x, k.clone().requires_grad_(), v, plan)
                if grad:
                    x.sum().backward()
            counts.append(counting.exchanges)
        return counts

    # With dedicated servers, a worker sends everything and computes nothing.
    assert LocalWorld(4).run(rank) == [[10, 20, 26]] * 4


def test_a_server_cannot_change_the_dtype_of_a_plan_and_all_are_told_what_can() -> None:
    plan = Batch([[301]], {"tile": 16, "min_shard": 16}).plan(servers=1)

    def rank(transport: LocalTransport) -> str:
        attention = CoreAttention(transport=transport, backend="reference")

        def use(plan: Plan, dtype: torch.dtype) -> None:
            if transport.rank == 1:
                attention.serve(plan, layers=1, backward=0)
                return
            with torch.no_grad():
                attention(*Tokens(plan, dtype).of_rank(0)[:3], plan)

        use(plan, torch.float32)
        use(replace(plan), torch.float64)
        with pytest.raises(ValueError, match="disagree on the dtype") as refused:
            use(plan, torch.float64)
        return str(refused.value)

    for said in LocalWorld(2).run(rank):
        assert said.endswith("for other tensors, make a new plan object on every rank")


def test_a_server_with_something_that_is_no_plan_is_told_on_all_ranks() -> None:
    plan = Batch([[301]], {"tile": 16, "min_shard": 16}).plan(servers=1)
    tokens = Tokens(plan, torch.float64)

    def one_rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference")
        part = (
            partial(attention.serve, plan.to_json(), layers=1)
            if transport.rank
            else partial(attention, *tokens.of_rank(0)[:3], plan)
        )
        with pytest.raises(ValueError, match=r"the plan is a dict: give what distca\.plan or"):
            part()

    LocalWorld(2).run(one_rank)


@pytest.mark.parametrize(
    ("backward", "message"),
    [(0, "disagree on the grad mode"), (4, "4 of 3 layers backward"), (-1, "-1 of 3 layers")],
)
def test_a_server_that_expects_something_else_is_told(backward: int, message: str) -> None:
    plan = Batch([[301]], {"tile": 16, "min_shard": 16}).plan(servers=1)
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport)
        part = (
            partial(attention.serve, plan, layers=3, backward=backward)
            if transport.rank
            else partial(attention, *leaves(tokens, 0), plan)
        )
        with pytest.raises(DisagreementError, match=message):
            part()

    LocalWorld(2).run(rank)


def test_the_op_is_sound() -> None:
    plan = Batch([[9, 4]]).plan()
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    qkv = leaves(Tokens(plan, torch.float64), 0)
    _, ready = attention._agree_on(Inputs(*qkv), plan)
    torch.library.opcheck(torch.ops.distca.core_attention.default, (*qkv, ready.handle))


@pytest.mark.parametrize("face", FACES)
def test_second_derivatives_are_refused(face: str) -> None:
    plan = Batch([[9, 4]]).plan()
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    q, k, v = leaves(Tokens(plan, torch.float64), 0)
    for power in (1, 2):  # with a constant grad_out, and with one that depends on q
        out = (
            attention(q, k, v, plan)
            if face == "op"
            else attention.dispatch(q, k, v, plan).combine()
        )
        grads = torch.autograd.grad((out**power).sum(), (q, k, v), create_graph=True)
        for grad in grads:
            with pytest.raises(RuntimeError, match="differentiated once, not twice"):
                torch.autograd.grad((grad**2).sum() + (q**2).sum(), q, retain_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v: (q[1:], k, v),
            r"q has shape .* on rank 0, where the plan places 43 tokens",
        ),
        (lambda q, k, v: (q[0, 0, 0], k, v), r"q has shape \(\) on rank 0"),
        (
            lambda q, k, v: (q[:, :0], k, v),
            r"q \(43, 0, 8\), .*: k and v must have the same",
        ),
        (lambda q, k, v: (q, k.float(), v), "k is torch.float32 on cpu but q is torch.float64"),
        (lambda q, k, v: (q, k.to("meta"), v), "k is torch.float64 on meta but q is"),
        (lambda q, k, v: (q, k[:, :1], v), "k and v must have the same number of heads"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of their heads"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "no attention backend fits"),
    ],
)
def test_tensors_that_do_not_match_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    plan = Batch([[40, 3]]).plan()
    inputs = change(*Tokens(plan, torch.float64).of_rank(0)[:3])
    with pytest.raises(DisagreementError, match=message):
        CoreAttention(transport=LocalTransport(LocalWorld(1), 0))(*inputs, plan)


@pytest.mark.parametrize("face", FACES)
def test_forward_mode_derivatives_are_refused(face: str) -> None:
    """They would be zero, since an operator has none by default."""
    plan = Batch([[9, 4]]).plan()
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    q, k, v = (t.detach() for t in leaves(Tokens(plan, torch.float64), 0))

    def attend(v: Tensor) -> Tensor:
        if face == "op":
            return attention(q, k, v, plan)
        return attention.dispatch(q, k, v, plan).combine()

    with pytest.raises(ValueError, match=r"no forward-mode derivative .*: use the"):
        torch.func.jvp(attend, (v,), (torch.ones_like(v),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(ValueError, match="no forward-mode derivative"):
            attend(dual)
        assert torch.equal(attend(v), attend(v.clone()))  # nothing to derive


@pytest.mark.parametrize("when", ["compute", "combine"])
def test_a_change_in_place_between_the_steps_is_refused(when: str) -> None:
    plan = Batch([[9, 4]]).plan()
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    q, k, v = (t.detach() for t in leaves(Tokens(plan, torch.float64), 0))
    pending = attention.dispatch(q, k, v, plan)
    if when == "combine":
        pending.compute()
    k.mul_(2)
    with pytest.raises(RuntimeError, match="q, k or v was changed in place after dispatch: peers"):
        pending.combine()
    other = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    with torch.inference_mode():  # where torch does not count changes
        assert other.dispatch(q.clone(), k.clone(), v, plan).combine().shape == q.shape


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan"), float("inf"), "x"])
def test_a_wrong_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=f"scale {scale}: give a positive number, or None for 1"):
        CoreAttention(transport=LocalTransport(LocalWorld(1), 0), scale=scale)


@pytest.mark.parametrize(
    ("layers", "words"),
    [(-1, "-1 layers to serve: give a whole number"), (1.5, "1.5 layers to serve: give a whole")],
)
def test_a_wrong_number_of_layers_to_serve_is_refused(layers: Any, words: str) -> None:
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0))
    with pytest.raises(ValueError, match=words):
        attention.serve(Batch([[9, 4]]).plan(), layers=layers)


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf")])
def test_a_wrong_softcap_is_refused(softcap: float) -> None:
    with pytest.raises(ValueError, match=f"softcap {softcap}: give a positive number, or 0 for no"):
        CoreAttention(transport=LocalTransport(LocalWorld(1), 0), softcap=softcap)


def test_a_backend_that_cannot_cap_scores_is_refused_on_every_rank() -> None:
    plan = Batch([[40], [3]]).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        backend = "sdpa" if transport.rank else "auto"
        attention = CoreAttention(transport=transport, backend=backend, softcap=30.0)
        with pytest.raises(DisagreementError, match="backend sdpa refuses: its kernels do not cap"):
            attention(*tokens.of_rank(transport.rank)[:3], plan)

    LocalWorld(2).run(rank)


def test_a_buffer_too_small_is_refused_before_anything_is_sent() -> None:
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        counting = Counting(transport)
        attention = CoreAttention(transport=counting, buffer_bytes=1000)
        with pytest.raises(DisagreementError, match=r"in one exchange but the buffers have 1,000"):
            attention(*leaves(tokens, transport.rank), plan)
        assert not counting.exchanges

    LocalWorld(3).run(rank)


@pytest.mark.parametrize("backend", ["sdpa", "blocks", "reference"])
@pytest.mark.parametrize("ranks", [[[50, 9]], [[30], [29]]])
def test_heads_of_any_strides(backend: str, ranks: list[list[int]]) -> None:
    """Views whose heads are no runs of numbers, in calls that move no rows as well."""
    plan = Batch(ranks).plan()
    tokens = Tokens(plan, torch.float64)

    def transposed(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def every_second(t: Tensor) -> Tensor:
        return torch.stack([t, -t], -1).flatten(-2)[..., ::2]

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend=backend, scale=SCALE)
        *given, grad_out = tokens.of_rank(transport.rank)
        results = []
        for view in (torch.Tensor.contiguous, transposed, every_second):
            qkv = [view(t.detach()).requires_grad_() for t in given]
            out = attention(*qkv, plan)
            results.append([out, *torch.autograd.grad(out, qkv, view(grad_out))])
        for changed in results[1:]:
            for one, other in zip(results[0], changed, strict=True):
                torch.testing.assert_close(one, other)

    LocalWorld(len(ranks)).run(rank)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("backend", ["blocks", "reference"])
def test_autocast_changes_nothing(backend: str, face: str) -> None:
    plan = Batch([[40, 9], [30]], {"tile": 16, "min_shard": 16}).plan()
    tokens = Tokens(plan, torch.float32)

    def rank(transport: LocalTransport) -> list[list[Tensor]]:
        attention = CoreAttention(transport=transport, backend=backend, scale=SCALE, softcap=20.0)
        *given, grad_out = tokens.of_rank(transport.rank)
        results = []
        for enabled in (False, True):
            qkv = [t.detach().clone().requires_grad_() for t in given]
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                if face == "op":
                    out = attention(*qkv, plan)
                else:
                    out = attention.dispatch(*qkv, plan).combine()
                assert out.dtype == torch.float32
                out.backward(grad_out)
            results.append([out, *(t.grad for t in qkv if t.grad is not None)])
        return results

    for plain, cast in LocalWorld(2).run(rank):
        for one, other in zip(plain, cast, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


class Sharded(Tensor):
    """Looks like a DTensor, which needs a mesh of ranks."""

    def to_local(self) -> Tensor:
        return self


NO_TENSOR: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "plan": (lambda given: given.__setitem__(3, None), "the plan is a NoneType: give what distca"),
    "json": (lambda given: given.__setitem__(3, {}), "the plan is a dict: give what distca.plan"),
    "list": (lambda given: given.__setitem__(0, [1.0]), "q is a list: give a dense tensor"),
    "none": (lambda given: given.__setitem__(2, None), "v is a NoneType: give a dense tensor"),
    "sparse": (
        lambda given: given.__setitem__(1, given[1].to_sparse()),
        "k is a torch.sparse_coo: give a dense tensor",
    ),
    "distributed": (
        lambda given: given.__setitem__(0, given[0].as_subclass(Sharded)),
        r"q is a Sharded: give q.to_local\(\)",
    ),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("what", NO_TENSOR)
def test_what_is_no_tensor_on_one_rank_is_told_on_all(what: str, known: bool) -> None:
    plan = Batch([[500], [30]], {"tile": 16, "min_shard": 16}).plan()
    assert plan.imbalance < plan.imbalance_before
    tokens = Tokens(plan, torch.float64)
    change, words = NO_TENSOR[what]

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        given = [*tokens.of_rank(transport.rank)[:3], plan]
        if known:
            attention(*given)
        if transport.rank:
            change(given)
        with pytest.raises(ValueError, match=words):
            attention(*given)

    LocalWorld(2).run(rank)


def test_inference_tensors_join_ranks_that_want_gradients() -> None:
    plan = Batch([[200], [30]], {"tile": 16, "min_shard": 16}).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> tuple[Tensor, ...]:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        *qkv, grad_out = (t.detach() for t in tokens.of_rank(transport.rank))
        if transport.rank:
            with torch.inference_mode():
                qkv = [t.clone() for t in qkv]
        else:
            qkv = [t.requires_grad_() for t in qkv]
        out = attention(*qkv, plan)
        out.backward(grad_out)
        assert transport.rank or all(t.grad is not None for t in qkv)
        return (out.detach(),)

    found = torch.cat([out for (out,) in LocalWorld(2).run(rank)])
    torch.testing.assert_close(found, tokens.expected()[0])


def test_what_is_no_tensor_is_told_to_nobody_where_nothing_moves() -> None:
    """The other ranks do not wait for this one, so it does not wait for them."""
    plan = Batch([[40], [40]]).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        q, k, v = tokens.of_rank(transport.rank)[:3]
        right = attention(q, k, v, plan)
        if transport.rank:
            with pytest.raises(ValueError, match="k is a list: give a dense tensor"):
                attention(q, [k], v, plan)  # type: ignore[arg-type]
        torch.testing.assert_close(attention(q, k, v, plan), right)

    LocalWorld(2).run(rank)
