"""FLOPs of a training step, counted document by document, for the MFU."""

import numpy as np
import torch

from distca.model.config import ModelConfig
from distca.planning.costs.base import BACKWARD_FLOPS
from distca.planning.masks import document_pairs
from distca.planning.spans import Ints

# Dense bfloat16 peak of the data sheets, by a part of the device's name.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak of a device; None if it is not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def step_flops(config: ModelConfig, lengths: Ints) -> float:
    """Returns FLOPs of forward and backward, without recomputation and padding."""
    tokens = float(np.sum(lengths))
    linear = 3.0 * config.linear_flops_per_token * tokens
    return linear + sum(
        (1.0 + BACKWARD_FLOPS) * attention_flops(config, layer, lengths)
        for layer in range(config.layers)
    )


def attention_flops(config: ModelConfig, layer: int, lengths: Ints) -> float:
    """Returns forward FLOPs of one layer's attention, of unmasked pairs only."""
    return config.shape.flops_per_pair * float(document_pairs(lengths, config.mask_of(layer)))
