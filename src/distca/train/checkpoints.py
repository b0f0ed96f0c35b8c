"""Checkpoints, which are written while training continues and can be loaded on any mesh.

Tensors are saved whole and by name (``train.state``), and every rank reads its shards. So a
checkpoint depends neither on the mesh nor on the optimizer's groups. Learning rates and weight
decays are not saved: they come from the configuration.
"""

import errno
import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from distca.model.llama import Llama
from distca.runtime.disk import is_full, no_space
from distca.runtime.mesh import RankContext
from distca.runtime.together import together
from distca.train.digests import SUMS, DigestWriter, ShowBytes, check_digests
from distca.train.extra import CheckExtra, Extra, check_model, read_extra
from distca.train.safe_reader import SafeReader, ShownPlanner
from distca.train.saved_tensors import first_sentence, saved_sizes
from distca.train.state import NamedState, check_weights, set_weights, weights_of
from distca.train.step_folders import (
    DamagedCheckpointError,
    StepFolders,
    complete,
    find,
    newest,
    remove,
    step_of,
)

_GB = 1e9


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded."""

    path: Path
    extra: Extra
    notes: list[str]  # sentences: later checkpoints that could not be loaded, missing digests


class Checkpoints:
    """The checkpoints of one run, in a folder that all workers share.

    All workers call every method.

    before_write: called with the step of a checkpoint, in the background, before this rank writes
        its share; an OSError counts as that of the disk.
    """

    before_write: Callable[[int], None] | None = None

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
        self._state, self._group = NamedState(model, optimizer), context.checkpoint_group
        self._leads = dist.get_rank(context.checkpoint_group) == 0
        # Copies the state before ``save`` returns; from a GPU, into pinned memory that the next
        # save reuses. torch 2.11 lets its ``DefaultStager`` be used for one save only.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._pending: tuple[Path, Future[Any]] | None = None

    def save(self, step: int, extra: Extra) -> None:
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
        with together(self._group):
            if self._leads:
                try:
                    self._folders.prepare(path, text)
                    self._check_space()
                except OSError as error:
                    raise ValueError(self._sentence(path, error)) from None
        future = state_dict_saver.async_save(
            self._state.tensors(),
            storage_writer=DigestWriter(path, self.before_write),
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
            # If a rank is lost after everything was written, the checkpoint is as good as any.
            done, cause = (path / SUMS).is_file(), _cause(error)
            words = self._sentence(path, cause) if isinstance(cause, OSError) else ""
            if self._leads and not done:
                with suppress(OSError):
                    remove(path)
            if words:
                raise ValueError(words) from error
            raise RuntimeError(
                f"{path} is {'complete, but its save failed' if done else 'incomplete'}"
                f" ({first_sentence(cause)}): earlier checkpoints are not affected"
            ) from error
        if self._leads:
            self._folders.tidy()

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint, including a save that is in progress."""
        self.wait()
        answer = [newest(self._folders.folder) if self._leads else None]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        return answer[0]

    def resume(
        self, step: int | None = None, check: CheckExtra = lambda path, extra: None
    ) -> Resumed | None:
        """Loads the newest checkpoint that can be read, or that of ``step``; None if none exists.

        Raises ValueError on all workers if that of ``step`` cannot be loaded, or none at all.

        check: raises ValueError for a checkpoint that the run may not go on from.
        """
        self.wait()
        answer: list[Any] = [None]
        folder = self._folders.folder
        with together(self._group):
            if self._leads:
                found = complete(folder) if step is None else [find(folder, step)]
                answer = [(found, self._folders.incomplete())]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        found, incomplete = answer[0]
        failed: list[str] = []
        for path in found:
            try:
                extra = self.load(path, check)
            except DamagedCheckpointError as error:
                if step is not None:
                    raise
                failed.append(str(error).partition(": load an earlier")[0])
                continue
            failed += [f"{one} is incomplete" for one in incomplete if step_of(one) > step_of(path)]
            notes = [f"{words}: {path.name} is used" for words in failed]
            if not (path / SUMS).is_file():
                notes.append(f"{path} has no {SUMS}, so its files could not be checked for damage")
            return Resumed(path, extra, notes)
        if failed:
            raise ValueError(
                f"no checkpoint can be loaded ({'; '.join(failed)}): start from the beginning with"
                " --fresh, which keeps these files"
            )
        return None

    def set_aside_after(self, step: int) -> list[str]:
        """Renames checkpoints of later steps, which must not win over those of this run.

        Returns their new names, on the first worker.
        """
        return self._folders.set_aside_after(step) if self._leads else []

    def load(self, path: Path, check: CheckExtra = lambda path, extra: None) -> Extra:
        """Loads model and optimizer; returns the ``extra`` that was saved with them.

        Raises ValueError on all workers, before anything is changed, if it cannot be loaded; where
        tensors are damaged and there are no digests, weights may have changed.

        check: see ``resume``.
        """
        self.wait()
        with together(self._group):
            check_digests(path, dist.get_rank(self._group), dist.get_world_size(self._group))
            extra = read_extra(path)
            check(path, extra)
            saved = saved_sizes(path)
            self._state.check(saved, path, is_same_model="model" in extra)
        state = self._state.empty(saved)
        _read_into(state, path, self._group)
        self._state.set(state)
        return extra

    def _check_space(self) -> None:
        """Raises OSError if a checkpoint does not fit on the disk, before anything is written."""
        usage = shutil.disk_usage(self._folders.folder)
        if usage.total and usage.free < self._num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    @property
    def _num_bytes(self) -> int:
        """The bytes of a checkpoint, about: shares of workers are even."""
        return self._state.num_bytes * dist.get_world_size(self._group)

    def _sentence(self, path: Path, error: OSError) -> str:
        """Returns why a checkpoint cannot be written, and what to do."""
        rest = "; earlier checkpoints are not affected"
        if not is_full(error):
            return f"{path} cannot be written ({error}): use a folder that can be written{rest}"
        needs = f"a checkpoint needs about {self._num_bytes / _GB:.3g} GB and "
        return f"{no_space(self._folders.folder, needs)}{rest}"


def load_weights(model: Llama, path: Path, show: ShowBytes = lambda num_bytes: None) -> None:
    """Loads only the weights of a checkpoint, in one process, into a model with memory.

    Raises ValueError if the checkpoint is damaged or from another model.

    show: called with the bytes of each file that is checked, and of each tensor that is read.
    """
    check_digests(path, 0, 1, show)
    extra = read_extra(path)
    check_model(path, extra, model.config)
    check_weights(model, saved_sizes(path), path, is_same_model="model" in extra)
    state = weights_of(model)
    _read_into(state, path, None, show)
    set_weights(model, state)


def _read_into(
    state: dict[str, Any],
    path: Path,
    group: dist.ProcessGroup | None,
    show: ShowBytes = lambda num_bytes: None,
) -> None:
    """Reads named tensors; without a group, in this process alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is intended
            state_dict_loader.load(
                state,
                storage_reader=SafeReader(path),
                planner=ShownPlanner(show),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise DamagedCheckpointError(
            f"{path} is damaged ({first_sentence(_cause(error))}): load an earlier checkpoint"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """Returns the first error of the ranks that took part in a load or a save."""
    return (
        error.failures[min(error.failures)][0] if isinstance(error, CheckpointException) else error
    )
