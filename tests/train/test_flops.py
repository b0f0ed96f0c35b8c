"""FLOPs of a step, counted pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.model.config import ModelConfig
from distca.train.flops import attention_flops, peak_flops, step_flops

TINY = ModelConfig(vocab_size=10, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16)


def test_attention_counts_only_pairs_that_are_seen() -> None:
    lengths = np.array([5, 3])
    causal = 5 * 6 // 2 + 3 * 4 // 2
    assert attention_flops(TINY, 0, lengths) == 4 * 2 * 4 * causal
    windowed = replace(TINY, window=2, window_pattern=2)
    assert attention_flops(windowed, 0, lengths) == 4 * 2 * 4 * ((1 + 2 * 4) + (1 + 2 * 2))
    assert attention_flops(windowed, 1, lengths) == 4 * 2 * 4 * causal


def test_a_step_is_forward_and_backward_of_all() -> None:
    lengths = np.array([5, 3])
    linear = 3 * TINY.linear_flops_per_token * 8
    attention = 2 * 3.5 * attention_flops(TINY, 0, lengths)
    assert step_flops(TINY, lengths) == pytest.approx(linear + attention)


def test_no_share_of_an_unknown_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
