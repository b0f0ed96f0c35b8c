"""A Llama-family model whose core attention is computed outside of it."""

from distca.model.config import ModelConfig, RopeScaling
from distca.model.layers import QKV
from distca.model.llama import Arriving, Leaving, Llama, Seam, on_meta, plainly
from distca.model.loss import Loss, cross_entropy
from distca.model.sizes import model_config

__all__ = [
    "QKV",
    "Arriving",
    "Leaving",
    "Llama",
    "Loss",
    "ModelConfig",
    "RopeScaling",
    "Seam",
    "cross_entropy",
    "model_config",
    "on_meta",
    "plainly",
]
