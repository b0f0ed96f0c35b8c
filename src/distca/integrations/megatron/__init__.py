"""Core attention for layer specs of Megatron-Core."""

from distca.integrations.megatron.attention import DistcaDotProductAttention

__all__ = ["DistcaDotProductAttention"]
