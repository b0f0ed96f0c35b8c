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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from distca.model.llama import Llama, on_meta

_MODEL, _OPTIMIZER = "model.", "optimizer."
_LISTED = 3  # names in an error


class NamedState:
    """Model and optimizer of one worker, as named tensors."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def tensors(self) -> dict[str, Any]:
        """Returns the tensors themselves, not copies."""
        return weights_of(self._model) | self._moments()

    def empty(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's own weights, and memory for the saved moments, to be loaded into."""
        return weights_of(self._model) | self._empty_moments(saved)

    def set(self, state: Mapping[str, Any]) -> None:
        """Sets weights and moments to what was loaded."""
        set_weights(self._model, state)
        self._set_moments({key: value for key, value in state.items() if _parameter_of(key)})

    @property
    def num_bytes(self) -> int:
        """The bytes of this worker's share."""
        return sum(_local_bytes(value) for value in self.tensors().values())

    def check(self, saved: Mapping[str, Any], path: Path) -> None:
        """Raises ValueError if what was saved in ``path`` is from another model."""
        check_weights(self._model, saved, path)
        with_moments = {_parameter_of(key) for key in saved}
        new = [name for name in self._trained() if name not in with_moments]
        if new and with_moments != {""}:
            raise ValueError(
                f"{path} has no optimizer state of {len(new)} parameters that are trained now"
                f" ({_list(new)}): freeze them as when it was saved"
            )

    # ``get_optimizer_state_dict`` is not used, since without moments it makes a step with gradients
    # of zero, after which AdamW counts one step too many.

    def _moments(self) -> dict[str, Any]:
        return {
            f"{_OPTIMIZER}{name}.{moment}": value
            for name, (_, parameter) in self._trained().items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _empty_moments(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Allocates the saved moments of trained parameters, sharded like the parameters."""
        trained = self._trained()
        moments: dict[str, Any] = {}
        for key, value in saved.items():
            name = _parameter_of(key)
            if name not in trained:
                continue
            _, parameter = trained[name]
            moments[key] = None  # a plain number, which needs no memory
            if isinstance(value, TensorStorageMetadata):
                dtype = value.properties.dtype
                if value.size == parameter.shape:
                    moments[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    moments[key] = torch.empty(value.size, dtype=dtype)
        return moments

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
    return {_MODEL + model.whole_name(name): weight for name, weight in weights.items()}


def set_weights(model: Llama, state: Mapping[str, Any]) -> None:
    names = get_model_state_dict(model)
    set_model_state_dict(model, {name: state[_MODEL + model.whole_name(name)] for name in names})


def check_weights(model: Llama, saved: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the weights that were saved in ``path`` are from another model."""
    whole = on_meta(model.config).named_parameters()
    here = {name: list(weight.shape) for name, weight in whole}
    there = {
        key.removeprefix(_MODEL): list(value.size)
        for key, value in saved.items()
        if key.startswith(_MODEL) and isinstance(value, TensorStorageMetadata)
    }
    differing = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} was saved from another model, {len(differing)} parameters differ"
            f" ({_list(differing)}): use the model that it was saved from, or another folder"
        )


def _parameter_of(key: str) -> str:
    """Returns the parameter of a moment's key; empty for the key of a weight."""
    return key.removeprefix(_OPTIMIZER).rpartition(".")[0] if key.startswith(_OPTIMIZER) else ""


def _local_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
