"""FLOPs of a step, counted pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from distca.model.config import ModelConfig
from distca.train.flops import peak_flops, step_flops

TINY = ModelConfig(vocab_size=10, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16)


def test_attention_counts_only_pairs_that_are_seen() -> None:
    lengths = np.array([5, 3])
    causal, window = 5 * 6 // 2 + 3 * 4 // 2, (1 + 2 * 4) + (1 + 2 * 2)
    linear, per_pair = TINY.shape.step_flops(8, 0), 3.5 * 4 * 2 * 4
    assert step_flops(TINY, lengths, 0 * lengths) == linear + per_pair * 2 * causal
    windowed = replace(TINY, window=2, window_pattern=2)
    assert step_flops(windowed, lengths, 0 * lengths) == linear + per_pair * (window + causal)


def test_a_prefix_is_counted_with_the_document_that_has_it() -> None:
    whole, rest = np.array([5, 5]), np.array([0, 3])
    own, pairs = TINY.shape.step_flops(7, 0), 15 + (4 + 5)
    assert step_flops(TINY, whole, rest) == own + 3.5 * 4 * 2 * 4 * 2 * pairs


def test_no_share_of_an_unknown_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
