"""Checkpoints: written while training goes on, loadable on any mesh, never half there.

Tensors are known whole and by name, ``model.<parameter>`` and ``optimizer.<parameter>.<moment>``,
and every rank reads its part of them; so neither the sizes of the mesh nor the groups of the
optimizer matter. Learning rates and decays are not kept: they come from the configuration.
"""

from __future__ import annotations

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
    """Those of one run, in a folder that all workers share. Every worker makes every call."""

    def __init__(
        self,
        folder: Path,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        context: RankContext,
        *,
        keep: int,
    ) -> None:
        assert context.checkpoint_group is not None, "a rank that only serves has nothing to save"
        self._folders = StepFolders(folder, keep)
        self._model, self._optimizer, self._group = model, optimizer, context.checkpoint_group
        self._leads = dist.get_rank(context.checkpoint_group) == 0
        # Copies everything before a save returns, into memory that the next save uses again.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._under_way: tuple[Path, Future[Any]] | None = None

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Copies the state and writes it meanwhile; waits for the save before.

        The first worker's ``extra`` is kept, and comes back as JSON has it.
        """
        try:
            text = json.dumps(extra, indent=1)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra of step {step} is not JSON ({error}): give numbers, text, lists and dicts"
            ) from None
        self.wait()
        path = self._folders.of(step)
        trouble = None
        if self._leads:
            try:
                self._folders.prepare(path, text)
            except OSError as error:
                trouble = f"{path} cannot be written ({error}): make room, or give another folder"
        self._agree(trouble)
        future = state_dict_saver.async_save(
            self._weights() | self._moments(),
            storage_writer=FileSystemWriter(path),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._under_way = path, cast("Future[Any]", future)

    def wait(self) -> None:
        """Until the last save is complete; call it before exit."""
        if self._under_way is None:
            return
        (path, future), self._under_way = self._under_way, None
        try:
            future.result()
        except (CheckpointException, Exception) as error:  # the former is no Exception
            raise RuntimeError(
                f"{path} is incomplete ({_words(error)}): earlier checkpoints stay as they were"
            ) from error
        if self._leads:
            self._folders.tidy()

    def newest(self) -> Path | None:
        """The newest complete one as the first worker sees it, after a save that is under way."""
        self.wait()
        answer = [newest(self._folders.folder) if self._leads else None]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        return answer[0]

    def load(self, path: Path) -> dict[str, Any]:
        """Fills model and optimizer; returns the ``extra`` that was saved with them.

        What is not loadable is refused on all workers before anything is changed.
        """
        self.wait()
        extra: dict[str, Any] = {}
        saved: Mapping[str, Any] = {}
        trouble = None
        try:
            extra, saved = read_extra(path), self._check(path)
        except ValueError as error:
            trouble = str(error)
        self._agree(trouble)
        weights = self._weights()
        state = weights | self._room(saved)
        try:
            state_dict_loader.load(
                state, storage_reader=FileSystemReader(path), process_group=self._group
            )
        except CheckpointException as error:
            raise RuntimeError(
                f"{path} is damaged ({_words(error)}): load an earlier checkpoint"
            ) from error
        here = {name: state[_MODEL + self._model.whole_name(name)] for name in self._names()}
        set_model_state_dict(self._model, here)
        self._give_moments({key: value for key, value in state.items() if key not in weights})
        return extra

    def _weights(self) -> dict[str, Any]:
        """By name; these are the model's own tensors, not copies."""
        weights = get_model_state_dict(self._model)
        return {_MODEL + self._model.whole_name(name): weight for name, weight in weights.items()}

    def _names(self) -> list[str]:
        return list(get_model_state_dict(self._model))

    # Moments are handled here, not by ``get_optimizer_state_dict``: where there are none yet, that
    # makes a step with gradients of zero, after which AdamW counts one step too many.

    def _moments(self) -> dict[str, Any]:
        return {
            f"{_OPTIMIZER}{name}.{moment}": value
            for name, (_, parameter) in self._learning().items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _room(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Memory for the moments that were saved of parameters that learn, sharded like them."""
        learning = self._learning()
        room: dict[str, Any] = {}
        for key, value in saved.items():
            name = _parameter_of(key)
            if name not in learning:
                continue
            _, parameter = learning[name]
            room[key] = None  # a plain number, which needs no memory
            if isinstance(value, TensorStorageMetadata):
                dtype = value.properties.dtype
                if value.size == parameter.shape:
                    room[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    room[key] = torch.empty(value.size, dtype=dtype)
        return room

    def _give_moments(self, moments: Mapping[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        learning = self._learning()
        for key, value in moments.items():
            place, _ = learning[_parameter_of(key)]
            state.setdefault(place, {})[key.rpartition(".")[2]] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _learning(self) -> dict[str, tuple[int, nn.Parameter]]:
        """What the optimizer changes, by name, with its place among the optimizer's parameters."""
        given = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        places = {parameter: place for place, parameter in enumerate(given)}
        return {
            self._model.whole_name(name): (places[parameter], parameter)
            for name, parameter in self._model.named_parameters()
            if parameter in places and parameter.requires_grad
        }

    def _check(self, path: Path) -> Mapping[str, Any]:
        """What was saved, by name, if it is of this model; of all of it, not of a stage."""
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
                f"{path} is of another model, {len(differing)} parameters differ"
                f" ({_list(differing)}): give the model it was saved from, or another folder"
            )
        with_moments = {_parameter_of(key) for key in saved}
        new = [name for name in self._learning() if name not in with_moments]
        if new and with_moments != {""}:
            raise ValueError(
                f"{path} has no optimizer state of {len(new)} parameters that learn now"
                f" ({_list(new)}): freeze them as they were when it was saved"
            )
        return saved

    def _agree(self, trouble: str | None) -> None:
        """One worker's trouble is raised on all, so that none waits for another in vain."""
        told: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, trouble, group=self._group)
        for words in told:
            if words is not None:
                raise ValueError(words)


def _parameter_of(key: str) -> str:
    """Whose moment a key names; nobody's if it names a weight."""
    return key.removeprefix(_OPTIMIZER).rpartition(".")[0] if key.startswith(_OPTIMIZER) else ""


def _words(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
