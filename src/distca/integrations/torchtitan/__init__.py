"""Overrides for torchtitan's configs."""

from distca.integrations.torchtitan.overrides import (
    InnerAttention,
    adopt,
    dataloader,
    inner_attention,
    metrics,
    selective_ac,
)

__all__ = ["InnerAttention", "adopt", "dataloader", "inner_attention", "metrics", "selective_ac"]
