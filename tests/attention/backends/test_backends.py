"""Every backend against the oracle: the same body on a CPU and, behind the marker, on CUDA."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention.oracle import Case, check, inputs_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distca.attention.backends import reference
from distca.attention.backends.base import Backend, Saved, Scoring, Traits
from distca.attention.backends.blocks import Blocks
from distca.attention.backends.choice import backends, choose
from distca.attention.backends.first_call import load_kernels
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import Mask

BACKENDS = {backend.name: backend for backend in backends()}
REFERENCE, SDPA = BACKENDS["reference"], BACKENDS["sdpa"]
BLOCKS = Blocks(block=16)  # so that small tasks have many
CPU = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(SDPA, id="sdpa"),
    pytest.param(BLOCKS, id="blocks"),
]

CASES = {
    "one query, one key": Case(((1, 1),)),
    "one query, many keys": Case(((1, 37),)),
    "square": Case(((33, 33),)),
    "queries << keys": Case(((5, 301), (2, 77))),
    "odd lengths": Case(((7, 7), (1, 1), (13, 29), (3, 5), (1, 64), (65, 129))),
    "equal shapes in a row": Case(((16, 24),) * 5 + ((1, 1),) * 7 + ((16, 24),) * 2),
    "one key each": Case(((1, 1),) * 9),
    "a task without queries": Case(((3, 3), (0, 4), (0, 0), (2, 5))),
    "no grouping": Case(((9, 20), (4, 4)), heads=3, kv_heads=3),
    "multi-query": Case(((9, 20), (4, 4)), heads=6, kv_heads=1, head_dim=16),
    "small values": Case(((9, 20), (4, 4)), "window:5", head_dim=12, v_head_dim=8),
    "large values": Case(((9, 20), (4, 4)), head_dim=4, v_head_dim=8),
    "many blocks of a window": Case(((300, 310), (200, 200)), heads=2, kv_heads=1),
    "sharp scores": Case(((20, 50),), scale=4.0),
    "no tasks": Case(()),
}
MASKS = ["causal", "full", "window:1", "window:3", "window:40", "window:5000"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask = draw(st.sampled_from(["causal", "full", "window:1", "window:2", "window:9"]))
    tasks = []
    for _ in range(draw(st.integers(0, 6))):
        queries = draw(st.integers(1, 24))
        least = 1 if mask == "full" else queries
        tasks.append((queries, draw(st.integers(least, queries + 40))))
    kv_heads = draw(st.integers(1, 3))
    return Case(
        tuple(tasks),
        mask,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 7, 16])),
        v_head_dim=draw(st.sampled_from([0, 0, 3, 8])),
        scale=draw(st.sampled_from([0.1, 0.5, 1.0])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(backend: Backend, mask: str, name: str) -> None:
    case = replace(CASES[name], mask=mask)
    check(backend, case, torch.float64, 1e-10)
    check(backend, case, torch.float32, 1e-5)


@pytest.mark.parametrize("backend", CPU)
@given(case=cases())
def test_equals_the_oracle_on_random_tasks(backend: Backend, case: Case) -> None:
    check(backend, case, torch.float64, 1e-10)
    check(backend, case, torch.float32, 1e-5)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@given(case=cases())
@settings(max_examples=10)
def test_16_bits_cost_only_their_rounding(
    backend: Backend, dtype: torch.dtype, epsilon: float, case: Case
) -> None:
    """It computes in float32: the log-sum-exp, which is not rounded, shows it.

    Some epsilons, since the backward gets the rounded output and takes differences with it.
    """
    check(backend, case, dtype, 4 * epsilon, lse_tolerance=1e-5)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("mask", ["causal", "full", "window:40"])
def test_twice_the_same_bits(backend: Backend, mask: str) -> None:
    case = Case(((130, 200), (64, 64), (64, 64), (1, 90)), mask, heads=8, kv_heads=2, head_dim=32)
    inputs = inputs_of(case, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    first, second = (run(backend, case, inputs, deterministic=True) for _ in range(2))
    torch.set_num_threads(threads)
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("mask", ["causal", "full", "window:4"])
def test_tasks_do_not_leak(backend: Backend, mask: str) -> None:
    """Other numbers in the middle task change no bit of its neighbors, not even from NaN."""
    case = Case(((6, 9), (6, 9), (6, 9)), mask)
    inputs = inputs_of(case, torch.float32)
    clean, clean_grads = run(backend, case, inputs)
    for rows, tensors in (((6, 12), (inputs.q, inputs.grad_out)), ((9, 18), (inputs.k, inputs.v))):
        for tensor in tensors:
            tensor[slice(*rows)] = float("nan")
    dirty, dirty_grads = run(backend, case, inputs)
    assert dirty.out[6:12].isnan().all()
    for a, b in zip((*clean, clean_grads.dq), (*dirty, dirty_grads.dq), strict=True):
        assert torch.equal(a[:6], b[:6])
        assert torch.equal(a[12:], b[12:])
    for a, b in zip(clean_grads[1:], dirty_grads[1:], strict=True):
        assert torch.equal(a[:9], b[:9])
        assert torch.equal(a[18:], b[18:])


@pytest.mark.parametrize("backend", CPU)
def test_takes_views_and_leaves_no_graph(backend: Backend) -> None:
    """q, k and v are slices of one fused projection that requires gradients."""
    case = Case(((5, 5), (8, 8)), heads=2, kv_heads=2)
    fused = torch.randn(13, 3, 2, 8, requires_grad=True)
    call = case.call()
    views, copies = fused.unbind(1), [x.contiguous() for x in fused.unbind(1)]
    got = backend.forward(*views, call, 0.5)
    assert not got.out.requires_grad
    assert not got.lse.requires_grad
    assert torch.equal(got.out, backend.forward(*copies, call, 0.5).out)
    grads = backend.backward(fused[:, 0], Saved(*views, *got), call, 0.5)
    right = backend.backward(copies[0], Saved(*copies, *got), call, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


def test_a_long_window_needs_no_square_of_memory() -> None:
    """The scores of 200,000 tokens would fill 160 GB."""
    tokens = 200_000
    case = Case(((tokens, tokens),), "window:8", heads=1, kv_heads=1, head_dim=2)
    inputs = inputs_of(case, torch.float32)
    attended, grads = run(SDPA, case, inputs)
    tail = Case(((100, 107),), "window:8", heads=1, kv_heads=1, head_dim=2)
    want = REFERENCE.forward(inputs.q[-100:], inputs.k[-107:], inputs.v[-107:], tail.call(), 0.3)
    torch.testing.assert_close(attended.out[-100:], want.out)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", [REFERENCE, BLOCKS, Blocks()], ids=["plain", "16", "1024"])
@given(case=cases(), softcap=st.sampled_from([0.3, 2.0, 50.0]))
def test_soft_caps(backend: Backend, case: Case, softcap: float) -> None:
    capped = replace(case, softcap=softcap)
    check(backend, capped, torch.float64, 1e-10)
    check(backend, capped, torch.float32, 1e-5)


def test_blocks_need_no_square_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a part has a block of queries and a block of keys."""
    largest = 0

    def measured(*args: object) -> Tensor:
        nonlocal largest
        scores = scores_of(*args)
        largest = max(largest, scores.numel())
        return scores

    scores_of = reference._scores
    monkeypatch.setattr(reference, "_scores", measured)
    case = Case(((700, 1500), (40, 40)), heads=4, kv_heads=2, head_dim=4, softcap=2.0)
    check(Blocks(block=64), case, torch.float64, 1e-10)
    assert largest == 4 * 64 * 64
    check(REFERENCE, case, torch.float64, 1e-10)
    assert largest == 4 * 700 * 1500


# On CUDA. Shapes as plans make them: a window task holds only keys that some query sees.
GPU_TASKS = {
    "documents": ((1, 1), (128, 128), (300, 300), (77, 77), (1, 1), (1024, 1024)),
    "shards": ((128, 1280), (1, 700), (200, 333), (64, 64), (513, 2000)),
    "single queries": ((1, 1), (1, 5), (1, 300)),
}
GPU_HEADS = {"grouped": (8, 2, 128), "multi-query": (4, 1, 64), "plain": (2, 2, 128)}
HALF = [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)]


def gpu_case(tasks: str, heads: str, mask: str) -> Case:
    count, kv, size = GPU_HEADS[heads]
    reach = Mask.parse(mask).reach
    shapes = [(q, min(k, q + reach - 1) if "window" in mask else k) for q, k in GPU_TASKS[tasks]]
    return Case(tuple(shapes), mask, count, kv, size, scale=size**-0.5)


def on_cuda(name: str, case: Case, dtype: torch.dtype, deterministic: bool = False) -> Backend:
    """The backend, or a skip that says why it cannot be tried here."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    inputs = inputs_of(replace(case, tasks=((1, 1),)), dtype, "cuda")
    traits = Traits.of(
        TensorSpec.of(inputs.q, inputs.k, inputs.v),
        [Mask.parse(case.mask)],
        deterministic=deterministic,
    )
    if refusal := BACKENDS[name].refusal(traits):
        pytest.skip(f"{name}: {refusal}")
    return choose(name, traits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash", "sdpa"])
@pytest.mark.parametrize(("dtype", "tolerance"), HALF)
@pytest.mark.parametrize("mask", ["causal", "full", "window:1", "window:100", "window:5000"])
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.parametrize("tasks", GPU_TASKS)
@pytest.mark.timeout(300)
def test_equals_the_oracle_on_cuda(
    name: str, dtype: torch.dtype, tolerance: float, mask: str, heads: str, tasks: str
) -> None:
    case = gpu_case(tasks, heads, mask)
    backend = on_cuda(name, case, dtype)
    check(backend, case, dtype, tolerance, "cuda", lse_tolerance=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "blocks", "reference"])
@pytest.mark.parametrize("mask", ["causal", "full", "window:100"])
@pytest.mark.parametrize("tasks", GPU_TASKS)
def test_float32_on_cuda(name: str, mask: str, tasks: str) -> None:
    case = gpu_case(tasks, "grouped", mask)
    check(on_cuda(name, case, torch.float32), case, torch.float32, 1e-5, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["blocks", "reference"])
@pytest.mark.parametrize("mask", ["causal", "window:100"])
def test_soft_caps_on_cuda(name: str, mask: str) -> None:
    case = replace(gpu_case("shards", "grouped", mask), softcap=2.0)
    check(on_cuda(name, case, torch.float32), case, torch.float32, 1e-5, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash", "sdpa"])
@pytest.mark.parametrize("mask", ["causal", "full", "window:100"])
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.timeout(300)
def test_deterministic_on_cuda(name: str, mask: str, heads: str) -> None:
    """Exact, bitwise equal ten times, and the global switches of torch are restored."""
    case = gpu_case("shards", heads, mask)
    backend = on_cuda(name, case, torch.bfloat16, deterministic=True)
    check(backend, case, torch.bfloat16, 2**-7, "cuda", lse_tolerance=1e-3, deterministic=True)
    inputs = inputs_of(case, torch.bfloat16, "cuda")
    first = run(backend, case, inputs, deterministic=True)
    for _ in range(9):
        again = run(backend, case, inputs, deterministic=True)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(a, b)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash", "sdpa", "blocks", "reference"])
def test_no_tasks_on_cuda(name: str) -> None:
    case = Case((), heads=8, kv_heads=2, head_dim=128)
    check(on_cuda(name, case, torch.bfloat16), case, torch.bfloat16, 0.0, "cuda", 1.0)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kinds", [{"causal"}, {"full", "window"}])
def test_kernels_are_loaded_for_every_mask_and_direction(
    backend: Backend, kinds: set[str], backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, tuple[int, int]]] = []
    for name in ("_forward", "_backward"):
        compute = getattr(backend, name)

        def recorded(*args: Any, name: str = name, compute: Any = compute) -> Any:
            (call,) = (one for one in args if isinstance(one, PackedCall))
            called.append((name, call.window))
            return compute(*args)

        monkeypatch.setattr(backend, name, recorded)
    spec = TensorSpec(4, 2, 16, 8, torch.float32, torch.device("cpu"))
    load_kernels(backend, spec, kinds, Scoring(0.25), backward=backward)
    windows = {(-1, 0)} if kinds == {"causal"} else {(-1, -1), (-1, 0), (127, 0)}
    assert {window for _, window in called} == windows
    assert {name for name, _ in called} == {"_forward", *(["_backward"] if backward else [])}
    assert len(called) == len(windows) * (1 + backward)
