"""Distributions keep what facts they state; batches are seeded and exact."""

import numpy as np
import pytest

from distca.data.length_names import names_distribution
from distca.data.lengths import distribution, take

CONTEXT = 131072
SPECS = [
    "pretrain", "prolong", "prolong:0.5", "reasoning", "agent", "chat", "lognormal:4000:1.2",
    "fixed:5000",
]  # fmt: skip


def long_share(spec: str, context: int = CONTEXT) -> float:
    """Of all tokens, those in documents of half the context or more."""
    lengths = distribution(spec, context).sample(400_000, np.random.default_rng(1))
    return float(lengths[lengths >= context / 2].sum() / lengths.sum())


@pytest.mark.parametrize("context", [65536, CONTEXT, 524288])
def test_pretrain_has_about_half_of_its_tokens_in_long_documents(context: int) -> None:
    assert long_share("pretrain", context) == pytest.approx(0.47, abs=0.02)


# At shorter contexts the tail of the short documents reaches half the context, and counts as long.
@pytest.mark.parametrize("context", [CONTEXT, 524288])
def test_prolong_has_13_percent_of_its_tokens_in_long_documents(context: int) -> None:
    assert long_share("prolong", context) == pytest.approx(0.135, abs=0.01)


def test_pretrain_has_about_ten_documents_per_context_and_some_of_exactly_that() -> None:
    lengths = distribution("pretrain", CONTEXT).sample(100_000, np.random.default_rng(2))
    assert CONTEXT / lengths.mean() == pytest.approx(10, rel=0.1)
    assert np.mean(lengths == CONTEXT) == pytest.approx(0.06 * 0.3, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_prolong_has_the_share_of_long_documents_that_is_asked_for(share: float) -> None:
    assert long_share(f"prolong:{share}", 524288) == pytest.approx(share, abs=0.01)


def test_a_share_of_more_than_all_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prolong:1.5: the share .* must be from 0 to 1"):
        distribution("prolong:1.5", CONTEXT)


def test_one_in_ten_completions_and_the_tail_of_the_others_reach_the_limit() -> None:
    """A log-normal of median 700 and sigma 0.9 exceeds 4,096 with a chance of 2.5 %."""
    lengths = distribution("reasoning", 4096).sample(400_000, np.random.default_rng(4))
    assert np.mean(lengths == 4096) == pytest.approx(0.1 + 0.9 * 0.025, abs=0.003)
    assert np.median(lengths[lengths < 4096]) == pytest.approx(678, rel=0.02)


def test_agent_traces_have_the_published_mean_and_largest_length() -> None:
    lengths = distribution("agent", 1 << 20).sample(67_074, np.random.default_rng(5))
    assert lengths.mean() == pytest.approx(27_000, rel=0.01)
    assert lengths.max() == pytest.approx(131_072, rel=0.2)


def test_chats_are_short_and_have_a_tail() -> None:
    lengths = distribution("chat", CONTEXT).sample(400_000, np.random.default_rng(6))
    assert np.median(lengths) == pytest.approx(550, rel=0.05)
    assert np.quantile(lengths, 0.99) == pytest.approx(3_700, rel=0.1)


def test_lognormal_has_its_median_and_sigma() -> None:
    lengths = distribution("lognormal:4000:0.5", CONTEXT).sample(100_000, np.random.default_rng(3))
    assert np.median(lengths) == pytest.approx(4000, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_tokens", [1, 4999, 5000, 5001, 8 * CONTEXT, 10_000_019])
def test_a_batch_has_exactly_its_tokens(spec: str, num_tokens: int) -> None:
    lengths = distribution(spec, CONTEXT).batch(num_tokens, seed=0)
    assert lengths.sum() == num_tokens
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.max() <= CONTEXT


@pytest.mark.parametrize("spec", ["pretrain", "prolong", "lognormal:4000:1.2"])
def test_a_seed_is_a_batch(spec: str) -> None:
    drawn = [distribution(spec, CONTEXT).batch(8 * CONTEXT, seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_longer_batch_begins_like_a_shorter_one() -> None:
    short, long = (distribution("prolong", CONTEXT).batch(n * CONTEXT, 7) for n in (4, 64))
    np.testing.assert_array_equal(long[: len(short) - 1], short[:-1])


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "web",
        "pretrain:1",
        "fixed",
        "fixed:",
        "fixed:1.5",
        "fixed:nan",
        "lognormal:9",
        "lognormal:a:b",
    ],
)
def test_an_unknown_distribution_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown: choose pretrain, prolong, prolong:SHARE"):
        distribution(spec, CONTEXT)


@pytest.mark.parametrize(
    ("spec", "context", "said"),
    [
        ("fixed:0", CONTEXT, "at least 1 and at most the context"),
        ("fixed:2000", 1000, "fixed:2000 with a context of 1000 tokens"),
        ("lognormal:0:1", CONTEXT, "the median must be above 0"),
        ("lognormal:9:-1", CONTEXT, "sigma at least 0"),
        ("pretrain", 0, "a context of 0 tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(spec: str, context: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distribution(spec, context)


def test_what_names_a_distribution() -> None:
    assert all(map(names_distribution, [*SPECS, "fixed", "lognormal:oops"]))
    assert not any(map(names_distribution, ["lengths.json", "data/pretrain", "", "web:1"]))


def test_taking_cuts_the_last_document() -> None:
    lengths = np.array([5, 3, 4])
    for num_tokens, expected in ((5, [5]), (6, [5, 1]), (12, [5, 3, 4])):
        assert take(lengths, num_tokens).tolist() == expected
    with pytest.raises(ValueError, match="hold 12 tokens but 13 are needed"):
        take(lengths, 13)


def test_lengths_beyond_64_bits_are_those_of_the_context() -> None:
    (first, *_) = distribution("lognormal:1e30:0", 8192).batch(16384, 0).tolist()
    assert first == 8192
