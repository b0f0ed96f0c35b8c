"""FLOPs of a training step, counted document by document, for the MFU."""

import numpy as np
import torch

from distca.model.config import ModelConfig
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


def step_flops(config: ModelConfig, lengths: Ints, prefixes: Ints) -> float:
    """Returns FLOPs of forward and backward, of unmasked pairs only, and without recomputation.

    prefixes: tokens of each document that are computed with another one
    """
    masks = [config.mask_of(layer) for layer in range(config.layers)]
    pairs = sum(document_pairs(lengths, mask) - document_pairs(prefixes, mask) for mask in masks)
    return config.shape.step_flops(float(np.sum(lengths - prefixes)), float(pairs))
