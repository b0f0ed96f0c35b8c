"""The tensors of a run by name: weights of the model, and moments of the optimizer.

Names are ``model.<parameter>`` and ``optimizer.<parameter>.<moment>``, where parameters are named
as in the whole model. So they depend neither on the mesh nor on the optimizer's groups.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from distca.model.llama import Llama, on_meta
from distca.train.saved_tensors import MODEL, OPTIMIZER, damaged_metadata

Sizes = Mapping[str, torch.Size]  # by name
_ARCHIVE_BYTES = 2048  # of the zip archive that a tensor is saved in, besides its numbers
_LISTED = 3  # names in an error


class NamedState:
    """Model and optimizer of one worker, as named tensors."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def tensors(self) -> dict[str, Any]:
        """Returns the tensors themselves, not copies."""
        return weights_of(self._model) | self._moments()

    def empty(self, saved: Sizes) -> dict[str, Any]:
        """Returns the model's own weights, and memory for the saved moments, to be loaded into."""
        return weights_of(self._model) | self._empty_moments(saved)

    def set(self, state: Mapping[str, Any]) -> None:
        """Sets weights and moments to what was loaded."""
        set_weights(self._model, state)
        self._set_moments({key: value for key, value in state.items() if _parameter_of(key)})

    @property
    def num_bytes(self) -> int:
        """The bytes of this worker's share, each tensor of which is saved as a zip archive."""
        return sum(_local_bytes(value) + _ARCHIVE_BYTES for value in self.tensors().values())

    def check(self, saved: Sizes, path: Path, *, is_same_model: bool) -> None:
        """Raises ValueError if what was saved in ``path`` is from another model, or damaged."""
        check_weights(self._model, saved, path, is_same_model=is_same_model)
        moments: dict[str, dict[str, torch.Size]] = {}
        for key, size in saved.items():
            if name := _parameter_of(key):
                moments.setdefault(name, {})[key.rpartition(".")[2]] = size
        trained = self._trained()
        new = [name for name in trained if name not in moments]
        if new and moments:
            raise ValueError(
                f"{path} has no optimizer state of {len(new)} parameters that are trained now"
                f" ({_list(new)}): freeze them as when it was saved"
            )
        for name in trained.keys() & moments:
            if moments[name] != _moment_sizes(trained[name][1]):
                raise damaged_metadata(path, f"the moments of {name} are not those of AdamW")

    # ``get_optimizer_state_dict`` is not used, since without moments it makes a step with gradients
    # of zero, after which AdamW counts one step too many.

    def _moments(self) -> dict[str, Any]:
        return {
            f"{OPTIMIZER}{name}.{moment}": value
            for name, (_, parameter) in self._trained().items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _empty_moments(self, saved: Sizes) -> dict[str, Any]:
        """Allocates the saved moments of trained parameters, sharded like the parameters."""
        return {
            key: torch.empty_like(parameter, requires_grad=False)
            if size == parameter.shape
            else torch.empty(size)
            for name, (_, parameter) in self._trained().items()
            for moment, size in _moment_sizes(parameter).items()
            if (key := f"{OPTIMIZER}{name}.{moment}") in saved
        }

    def _set_moments(self, moments: Mapping[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        trained = self._trained()
        for key, value in moments.items():
            index, _ = trained[_parameter_of(key)]
            state.setdefault(index, {})[key.rpartition(".")[2]] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _trained(self) -> dict[str, tuple[int, nn.Parameter]]:
        """Returns trained parameters by name, with their index in the optimizer."""
        optimized = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        indices = {parameter: index for index, parameter in enumerate(optimized)}
        return {
            self._model.whole_name(name): (indices[parameter], parameter)
            for name, parameter in self._model.named_parameters()
            if parameter in indices and parameter.requires_grad
        }


def weights_of(model: Llama) -> dict[str, Any]:
    """Returns the model's own tensors by name, not copies."""
    weights = get_model_state_dict(model)
    return {MODEL + model.whole_name(name): weight for name, weight in weights.items()}


def set_weights(model: Llama, state: Mapping[str, Any]) -> None:
    names = get_model_state_dict(model)
    set_model_state_dict(model, {name: state[MODEL + model.whole_name(name)] for name in names})


def check_weights(model: Llama, saved: Sizes, path: Path, *, is_same_model: bool) -> None:
    """Raises ValueError if the weights that were saved in ``path`` are from another model.

    is_same_model: whether the checkpoint is known to be from this one; then it is damaged.
    """
    whole = on_meta(model.config).named_parameters()
    here = {name: list(weight.shape) for name, weight in whole}
    there = {
        key.removeprefix(MODEL): list(size) for key, size in saved.items() if key.startswith(MODEL)
    }
    differing = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differing and is_same_model:
        raise damaged_metadata(path, _list(differing))
    if differing:
        raise ValueError(
            f"{path} was saved from another model, {len(differing)} parameters differ"
            f" ({_list(differing)}): use the model that it was saved from, or another folder"
        )


def _moment_sizes(parameter: nn.Parameter) -> dict[str, torch.Size]:
    """Returns the sizes of what AdamW keeps of a parameter."""
    return {"step": torch.Size([]), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}


def _parameter_of(key: str) -> str:
    """Returns the parameter of a moment's key; empty for the key of a weight."""
    return key.removeprefix(OPTIMIZER).rpartition(".")[0] if key.startswith(OPTIMIZER) else ""


def _local_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
