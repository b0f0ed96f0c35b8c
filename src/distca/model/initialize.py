"""Initial weights that are the same on every mesh.

Each parameter is drawn whole, from a generator that is seeded by its name, and then sharded. So it
depends neither on the mesh nor on other parameters, and a pipeline stage draws the same weights as
the whole model. Initialising shards in place would give all ranks the same numbers.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from distca.model.llama import Llama

STD = 0.02
INTO_RESIDUAL = (".wo.weight", ".w2.weight")  # added to the residual, two per layer


def initialize(model: Llama, seed: int, *, device: torch.device | str | None = None) -> None:
    """Allocates what is on meta and draws every parameter from a normal distribution; norms are 1.

    Weights whose output is added to the residual are scaled by 1 / sqrt(2 x layers), so that the
    residual does not grow with depth. Besides the model, memory for one whole parameter is needed.
    CPU and CUDA generators draw different numbers, so weights agree only on devices of one kind.
    """
    materialize(model, device)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            fill(parameter, torch.ones(parameter.shape, device=parameter.device))
            continue
        std = STD * (2 * model.config.layers) ** -0.5 if name.endswith(INTO_RESIDUAL) else STD
        number = _seed_of(seed, model.whole_name(name))
        generator = torch.Generator(parameter.device).manual_seed(number)
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        fill(parameter, drawn.normal_(0.0, std, generator=generator))


def materialize(model: Llama, device: torch.device | str | None = None) -> None:
    """Allocates the memory of a model on meta, uninitialised; changes no other model."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device or "cpu")
        model.tie()  # to_empty allocates a tied weight twice


@torch.no_grad()
def fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copies a whole tensor, or this rank's shard of it, into a parameter without communication."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = whole.to(mesh.device_type)  # every rank has the whole tensor, so nothing is sent
        share = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(share.to_local())
    else:
        parameter.copy_(whole)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
