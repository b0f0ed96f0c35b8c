from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from model import bodies
from model.plain import attention, positions_of, tiny
from ranks import RankPool
from torch import Tensor

from distca.data.documents import IGNORE
from distca.model import llama
from distca.model.config import ModelConfig, RopeScaling
from distca.model.initialize import initialize
from distca.model.layers import frequencies, rotate
from distca.model.llama import EMBEDDING, Arriving, Llama, plainly
from distca.model.loss import cross_entropy
from distca.pipeline.schedule import FORWARD
from distca.pipeline.tick_program import TickProgram

LENGTHS = bodies.LENGTHS
FAMILIES = {
    "llama": tiny(),
    "qwen3": tiny(qk_norm=True, tied=True),
    "windows": tiny(window=3, window_pattern=2),
}


def model_of(config: ModelConfig, start: int = 0, stop: int | None = None) -> Llama:
    model = Llama(config, start, stop)
    initialize(model, seed=3)
    return model


def batch(seed: int = 0, *shape: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [*shape, T]."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(37, (2, *shape, sum(LENGTHS)), generator=generator)
    labels[..., ::5] = IGNORE
    return tokens, labels


def step(
    model: Llama, *halves: tuple[Tensor, Tensor], recompute: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all halves, plainly."""
    arriving = [Arriving(t, positions_of(LENGTHS), labels=labels) for t, labels in halves]
    dispatch = plainly(attention(LENGTHS, model.config.mask_of))
    leavings = model(arriving, dispatch, recompute=recompute)
    total = sum(leaving.loss.total for leaving in leavings)
    total.backward()
    return total.item(), bodies.gradients(model)


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, name


def test_recomputation_has_the_same_gradients_and_leaves_the_loss_out() -> None:
    """The loss keeps no logits, so to compute it again would save nothing."""
    loss, wanted = step(model_of(tiny()), batch())
    with patch.object(llama, "cross_entropy", wraps=cross_entropy) as losses:
        again, found = step(model_of(tiny()), batch(), recompute=True)
    assert again == pytest.approx(loss)
    assert_same_gradients(found, wanted)
    assert losses.call_count == 1


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_documents_do_not_know_of_each_other(config: ModelConfig) -> None:
    model, (tokens, _) = model_of(config), batch()
    half = Arriving(tokens, positions_of(LENGTHS))
    (packed,) = model([half], plainly(attention(LENGTHS, config.mask_of)))
    assert packed.x.shape == (sum(LENGTHS), config.vocab_size)
    for document, got in zip(tokens.split(LENGTHS), packed.x.split(LENGTHS), strict=True):
        length = len(document)
        alone = Arriving(document, torch.arange(length))
        (want,) = model([alone], plainly(attention([length], config.mask_of)))
        torch.testing.assert_close(got, want.x)


def test_labels_make_a_loss_of_the_logits() -> None:
    model, (tokens, labels) = model_of(FAMILIES["llama"]), batch()
    dispatch = plainly(attention(LENGTHS, model.config.mask_of))
    half = Arriving(tokens, positions_of(LENGTHS), labels=labels)
    with_labels, without = model([half, half._replace(labels=None)], dispatch)
    assert with_labels.loss is not None
    assert without.loss is None
    want = torch.nn.functional.cross_entropy(without.x, labels, reduction="none")
    torch.testing.assert_close(with_labels.loss.each, want)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_two_halves_are_as_good_as_each_alone(config: ModelConfig) -> None:
    ping, pong = batch(1), batch(2)
    loss, grads = step(model_of(config), ping, pong)
    first, second = step(model_of(config), ping), step(model_of(config), pong)
    assert loss == pytest.approx(first[0] + second[0])
    assert_same_gradients(grads, {name: first[1][name] + second[1][name] for name in grads})


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_rank_without_tokens_goes_along(config: ModelConfig) -> None:
    """Its q, k and v are empty but of the graph, so that it joins the exchanges of others."""
    model, none = model_of(config), torch.empty(0, dtype=torch.int64)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.shape, k.shape, v.shape) == ((0, 4, 8), (0, 2, 8), (0, 2, 8))
        assert q.requires_grad
        return q + k.sum() + v.sum()

    (leaving,) = model([Arriving(none, none, labels=none)], plainly(attend))
    leaving.loss.total.backward()
    assert leaving.loss.total == 0
    assert not any(grad.any() for grad in bodies.gradients(model).values())


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_stages_are_the_model(cuts: tuple[int, ...]) -> None:
    """Parameters have the same names and numbers, and what flows through is the same."""
    config, (tokens, labels) = FAMILIES["llama"], batch()
    want, want_grads = step(model_of(config), (tokens, labels))
    stages = [model_of(config, *cut) for cut in pairwise(cuts)]
    x, dispatch = tokens, plainly(attention(LENGTHS, config.mask_of))
    for stage in stages:
        (leaving,) = stage([Arriving(x, positions_of(LENGTHS), labels=labels)], dispatch)
        x = leaving.x
    leaving.loss.total.backward()
    assert leaving.loss.total.item() == want
    parts = [bodies.gradients(stage) for stage in stages]
    assert sum(map(len, parts)) == len(want_grads)
    assert_same_gradients({k: v for part in parts for k, v in part.items()}, want_grads)


def test_attention_runs_in_the_order_of_the_tick_program() -> None:
    model, seen = model_of(FAMILIES["llama"]), []
    half = Arriving(batch()[0], positions_of(LENGTHS))

    class Recorded:
        def __init__(self, layer: int, half: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            self.half, self.q = half, q
            seen.append(("dispatch", half))

        def compute(self) -> None:
            seen.append(("compute", self.half))

        def combine(self) -> Tensor:
            seen.append(("combine", self.half))
            return self.q

    model([half, half], Recorded)
    program = TickProgram.of(model.config.layers, 2, FORWARD).operations
    assert seen == [(op.kind, op.half) for op in program if op.kind != "linear"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fsdp_gathers_a_seam_once_for_both_halves(pool: RankPool, name: str) -> None:
    """Four ways at once: sharded, two halves, checkpointed, attending between the halves."""
    config, (tokens, labels) = FAMILIES[name], batch(0, 2, 2)
    pairs = zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True)
    want, want_grads = step(model_of(config), *pairs)
    results = pool.run(bodies.sharded_step, config, tokens, labels, ranks=2)
    assert sum(loss for loss, _, _ in results) == pytest.approx(want)
    units = config.layers + (0 if config.tied else 1)  # tied ends are one unit
    for _, grads, collectives in results:
        assert_same_gradients(grads, want_grads)
        assert collectives == {"_allgather_base_": 2 * units, "_reduce_scatter_base_": units}


def test_mixed_precision_of_fsdp(pool: RankPool) -> None:
    config, (tokens, labels) = FAMILIES["qwen3"], batch(0, 2, 2)
    pairs = zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True)
    want, want_grads = step(model_of(config), *pairs)
    dtype = torch.bfloat16
    results = pool.run(bodies.sharded_step, config, tokens, labels, dtype, ranks=2)
    assert sum(loss for loss, _, _ in results) == pytest.approx(want, rel=1e-3)
    for name, grad in results[0][1].items():
        assert grad.dtype == torch.float32
        assert (grad - want_grads[name]).norm() < 0.03 * want_grads[name].norm(), name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tensor_parallel_plans_of_torch_apply(pool: RankPool, name: str) -> None:
    config, (tokens, labels) = FAMILIES[name], batch()
    want, want_grads = step(model_of(config), (tokens, labels))
    results = pool.run(bodies.split_step, config, tokens, labels, ranks=2)
    assert sum(loss for loss, _ in results) == pytest.approx(want)
    for _, grads in results:
        assert_same_gradients(grads, want_grads)


def test_names_count_seams_of_the_whole_model() -> None:
    names = [name for name, _ in Llama(tiny(qk_norm=True), 1, 2).named_parameters()]
    before = ["norm", "qkv.wq", "qkv.wk", "qkv.wv", "qkv.q_norm", "qkv.k_norm"]
    after = ["wo", "norm", "ffn.w1", "ffn.w2", "ffn.w3"]
    assert names == [
        *(f"seams.1.before.{name}.weight" for name in before),
        *(f"seams.2.after.{name}.weight" for name in after),
    ]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_a_stage_outside_the_model_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"layers \[{start}, {stop}\) of a model with 3"):
        Llama(tiny(), start, stop)


def test_tied_ends_in_two_stages_are_the_same_parameter_twice() -> None:
    config = tiny(tied=True)
    first, last = Llama(config, 0, 2), Llama(config, 2)
    for stage in (first, last):
        initialize(stage, seed=0)
    ends = (EMBEDDING, f"seams.{config.layers}.head.output.weight")
    assert [stage.whole_name(end) for stage, end in zip((first, last), ends, strict=True)] == [
        EMBEDDING,
        EMBEDDING,
    ]
    assert torch.equal(first.get_parameter(ends[0]), last.get_parameter(ends[1]))
    names = {stage.whole_name(n) for stage in (first, last) for n, _ in stage.named_parameters()}
    assert names == {name for name, _ in Llama(config).named_parameters()}


def test_rotation_turns_pairs_by_position() -> None:
    """As complex numbers, which the code avoids: (a + ib) exp(i position frequency)."""
    x = torch.randn(7, 3, 8, dtype=torch.float64)
    angles = torch.arange(7)[:, None] * frequencies(8, 10000.0, None, x.device)
    got = rotate(x, angles.cos()[:, None], angles.sin()[:, None])
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angles)[:, None]
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-6)


def test_scaled_frequencies() -> None:
    cpu = torch.device("cpu")
    plain = frequencies(64, 500000.0, None, cpu)
    torch.testing.assert_close(frequencies(64, 5e5, RopeScaling("linear", 4.0), cpu), plain / 4)
    ratio = plain / frequencies(64, 5e5, RopeScaling("llama3", 8.0), cpu)
    turns = 8192 * plain / (2 * torch.pi)
    assert (ratio[turns > 4] == 1).all()
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 8.0))
    assert (ratio.diff() >= -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()
