"""Bytes and FLOPs of a token."""

import pytest

from distca.planning.models import MODELS, ModelShape, model_shape


def test_llama_8b_weighs_what_was_published() -> None:
    shape = model_shape("llama3-8b")
    assert (shape.q_bytes, shape.kv_bytes) == (8 * 1024, 4 * 1024)
    assert shape.flops_per_pair == 4 * 4096
    assert (shape.layers, shape.hidden, shape.ffn) == (32, 4096, 14336)


def test_llama_34b_weighs_what_was_published() -> None:
    shape = model_shape("llama-34b")
    assert (shape.heads, shape.head_dim, shape.layers) == (64, 128, 48)
    assert shape.kv_bytes == 2 * 2048, "K and V together are 2048 wide, in two bytes each"


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_is_whole(name: str) -> None:
    shape = model_shape(name)
    assert shape.name == name
    assert shape.heads % shape.kv_heads == 0
    assert shape.layers
    assert min(shape.hidden, shape.ffn) > 0 or shape.latent_dim  # those with experts


def test_grouped_heads_make_keys_lighter() -> None:
    many, one = ModelShape("mha", 8, 8, 16), ModelShape("mqa", 8, 1, 16)
    assert many.q_bytes == one.q_bytes == 2 * 8 * 16
    assert (many.kv_bytes, one.kv_bytes) == (2 * 2 * 8 * 16, 2 * 2 * 16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, 8), "heads = 0 in model m: it must be a whole number from 1 to 1048576"),
        ((4, 0, 8), "kv_heads = 0 in model m"),
        ((4, 4, -8), "head_dim = -8 in model m"),
        ((6, 4, 8), "6 heads over 4 kv heads in model m: heads must be a multiple"),
    ],
)
def test_an_impossible_shape_is_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape("m", *shape)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model 'gpt' is unknown: choose one of .*llama3-8b"):
        model_shape("gpt")
