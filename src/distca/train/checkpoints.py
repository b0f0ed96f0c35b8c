"""Checkpoints, which are written while training continues and can be loaded on any mesh.

Tensors are saved whole and by name, ``model.<parameter>`` and ``optimizer.<parameter>.<moment>``,
and every rank reads its shards. So a checkpoint depends neither on the mesh nor on the optimizer's
groups. Learning rates and weight decays are not saved: they come from the configuration.
"""

import json
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from distca.model.llama import Llama, on_meta
from distca.runtime.mesh import RankContext
from distca.train.step_folders import COMPLETE, StepFolders, newest, read_extra

_MODEL, _OPTIMIZER = "model.", "optimizer."
_LISTED = 3  # names in a message


class Checkpoints:
    """The checkpoints of one run, in a folder that all workers share.

    All workers call every method.
    """

    def __init__(
        self,
        folder: Path,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        context: RankContext,
        *,
        keep: int,
    ) -> None:
        assert context.checkpoint_group is not None, "a dedicated server has nothing to save"
        self._folders = StepFolders(folder, keep)
        self._model, self._optimizer, self._group = model, optimizer, context.checkpoint_group
        self._leads = dist.get_rank(context.checkpoint_group) == 0
        # Copies the state before ``save`` returns, into memory that the next save reuses.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._pending: tuple[Path, Future[Any]] | None = None

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Copies the state and writes it in the background, after the previous save is complete.

        extra: further state, as JSON; that of the first worker is saved.
        """
        try:
            text = json.dumps(extra, indent=1)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra of step {step} is not JSON ({error}): use numbers, text, lists and dicts"
            ) from None
        self.wait()
        path = self._folders.of(step)
        problem = None
        if self._leads:
            try:
                self._folders.prepare(path, text)
            except OSError as error:
                problem = f"{path} cannot be written ({error}): free space, or use another folder"
        self._raise_on_all(problem)
        future = state_dict_saver.async_save(
            self._weights() | self._moments(),
            storage_writer=FileSystemWriter(path),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._pending = path, cast("Future[Any]", future)

    def wait(self) -> None:
        """Waits until the last save is complete; has to be called before exit."""
        if self._pending is None:
            return
        (path, future), self._pending = self._pending, None
        try:
            future.result()
        except (CheckpointException, Exception) as error:  # the former is a BaseException
            raise RuntimeError(
                f"{path} is incomplete ({_message(error)}): earlier checkpoints are not affected"
            ) from error
        if self._leads:
            self._folders.tidy()

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint, including a save that is in progress."""
        self.wait()
        answer = [newest(self._folders.folder) if self._leads else None]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        return answer[0]

    def load(self, path: Path) -> dict[str, Any]:
        """Loads model and optimizer; returns the ``extra`` that was saved with them.

        Raises ValueError on all workers, before anything is changed, if it cannot be loaded.
        """
        self.wait()
        extra: dict[str, Any] = {}
        saved: Mapping[str, Any] = {}
        problem = None
        try:
            extra, saved = read_extra(path), self._check(path)
        except ValueError as error:
            problem = str(error)
        self._raise_on_all(problem)
        weights = self._weights()
        state = weights | self._empty_moments(saved)
        try:
            state_dict_loader.load(
                state, storage_reader=FileSystemReader(path), process_group=self._group
            )
        except CheckpointException as error:
            raise RuntimeError(
                f"{path} is damaged ({_message(error)}): load an earlier checkpoint"
            ) from error
        names = get_model_state_dict(self._model)
        here = {name: state[_MODEL + self._model.whole_name(name)] for name in names}
        set_model_state_dict(self._model, here)
        self._set_moments({key: value for key, value in state.items() if key not in weights})
        return extra

    def _weights(self) -> dict[str, Any]:
        """Returns the model's own tensors by name, not copies."""
        weights = get_model_state_dict(self._model)
        return {_MODEL + self._model.whole_name(name): weight for name, weight in weights.items()}

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
        given = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        indices = {parameter: index for index, parameter in enumerate(given)}
        return {
            self._model.whole_name(name): (indices[parameter], parameter)
            for name, parameter in self._model.named_parameters()
            if parameter in indices and parameter.requires_grad
        }

    def _check(self, path: Path) -> Mapping[str, Any]:
        """Returns the metadata of the saved tensors. Raises ValueError for another model."""
        try:
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # unpickling may raise anything
            raise ValueError(
                f"{path / COMPLETE} is damaged ({error}): load an earlier checkpoint"
            ) from None
        whole = on_meta(self._model.config).named_parameters()
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
        with_moments = {_parameter_of(key) for key in saved}
        new = [name for name in self._trained() if name not in with_moments]
        if new and with_moments != {""}:
            raise ValueError(
                f"{path} has no optimizer state of {len(new)} parameters that are trained now"
                f" ({_list(new)}): freeze them as when it was saved"
            )
        return saved

    def _raise_on_all(self, problem: str | None) -> None:
        """Raises ValueError on all workers if one has a problem, so that none deadlocks."""
        problems: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(problems, problem, group=self._group)
        for message in problems:
            if message is not None:
                raise ValueError(message)


def _parameter_of(key: str) -> str:
    """Returns the parameter of a moment's key; empty for the key of a weight."""
    return key.removeprefix(_OPTIMIZER).rpartition(".")[0] if key.startswith(_OPTIMIZER) else ""


def _message(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
