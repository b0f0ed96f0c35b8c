"""The result of a run, in one process: its checkpoint, exported or evaluated."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distca import schema
from distca.data.documents import Batch, Document, Tree
from distca.data.loader import in_batches
from distca.data.sources import open_source
from distca.data.tokenizers import Tokenizer
from distca.model.checkpoints import save
from distca.model.config import ModelConfig
from distca.model.hf_config import to_hf
from distca.model.initialize import materialize
from distca.model.llama import on_meta
from distca.pipeline.mesh import MeshShape
from distca.runtime.disk import check_space, writing
from distca.runtime.mesh import join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner
from distca.runtime.world import join_world
from distca.train import setup
from distca.train.checkpoints import load_weights
from distca.train.config import Config, ParallelSection
from distca.train.digests import digested_bytes
from distca.train.evaluate import NAMES, losses_by_length
from distca.train.hf_tokenizer import special_ids, write_tokenizer
from distca.train.step_folders import find, newest, step_of

ShowShare = Callable[[float, int], None]

_BATCH_TOKENS = 16384  # of an evaluation, so that short documents are computed many at once


@dataclass(frozen=True)
class TrainedRun:
    """A run and one of its checkpoints."""

    config: Config
    checkpoint: Path

    @classmethod
    def open(cls, folder: Path, step: int | None = None) -> "TrainedRun":
        """Opens the checkpoint of a step, by default the newest. Raises ValueError without one."""
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no config.json: give the folder of a run of distca train, such as"
                " runs/latest"
            )
        try:
            config = schema.build(Config, json.loads(path.read_text()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not the config of a run: {error}") from None
        checkpoints = folder / "checkpoints"
        found = newest(checkpoints) if step is None else find(checkpoints, step)
        if found is None:
            raise ValueError(
                f"{folder} has no complete checkpoint: continue the run until it has saved one"
            )
        return cls(config, found)

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    def export(
        self,
        out: Path,
        dtype: torch.dtype = torch.float32,
        show: Callable[[float], None] = lambda share: None,
    ) -> dict[str, Any]:
        """Writes the model and its tokenizer as a folder that ``transformers`` loads.

        Returns the checkpoint, the files, and whether there is a tokenizer among them: a run on
        token ids has none.

        show: called with the share of all bytes that have been checked, read or written.
        """
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(f"{out} exists and is not an empty folder: choose another --out")
        tokenizer, config = self._tokenizer_and_model()
        # Positions beyond those of the named model were trained, and transformers shall know.
        config = replace(config, context=max(config.context, self.config.data.context))
        to_hf(config)  # refuses, before anything is read, a model that transformers does not have
        model = on_meta(config)
        materialize(model, "cpu")
        read = sum(p.numel() * p.itemsize for p in model.parameters())
        written = sum(p.numel() * dtype.itemsize for p in model.parameters())
        check_space(out, "the model", written)
        done, total = 0, digested_bytes(self.checkpoint) + read + written

        def add(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            show(done / total)

        load_weights(model, self.checkpoint, add)
        ids = special_ids(tokenizer)
        with writing(out):
            save(model, out, dtype=dtype, extra=ids, show=add)
            (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
            has_tokenizer = write_tokenizer(self.config.data, tokenizer, config.context, out)
        files = sorted(path.name for path in out.iterdir())
        return self._about() | {"out": str(out), "files": files, "tokenizer": has_tokenizer}

    def evaluate(
        self,
        sources: Sequence[str] = (),
        num_tokens: int | None = None,
        show: ShowShare | None = None,
    ) -> dict[str, Any]:
        """Returns loss and perplexity per target, overall and by document length.

        sources: as in ``data.sources``, all of whose documents are read; by default the documents
            that the run has held out.
        num_tokens: those of the first documents that are read; by default all.
        show: called after each batch with the share of all work, and the tokens so far.
        """
        tokenizer, model_config = self._tokenizer_and_model()
        batches, num_documents = self._batches(tokenizer, sources)
        batches = _first(batches, num_documents, num_tokens, show)
        device, alone = join_world(), self._on_one_rank()
        context = join_mesh(MeshShape(), device)
        model = on_meta(model_config)
        parallelize(model, context, Precision.named(alone.parallel.precision, device))
        materialize(model, device)
        load_weights(model, self.checkpoint)
        runner = StepRunner.of(context, **setup.runner_options(alone, device))
        planner = setup.planner_of(alone, MeshShape(), model_config, device)
        found = losses_by_length(model, runner, planner, batches, lambda: False)
        assert found is not None
        if not found.counts.sum():
            words = ", ".join(sources) or "the run"
            raise ValueError(
                f"the documents of {words} have no target: they have fewer than two tokens, or more"
                f" than data.context = {self.config.data.context} with data.overlong = drop; give"
                " other data"
            )
        by_length = {
            name: _figures(float(total), int(count))
            for name, total, count in zip(NAMES, found.sums, found.counts, strict=True)
            if count
        }
        total = _figures(float(found.sums.sum()), int(found.counts.sum()))
        return self._about() | total | {"by_length": by_length}

    def _about(self) -> dict[str, Any]:
        return {"checkpoint": str(self.checkpoint), "step": self.step}

    def _tokenizer_and_model(self) -> tuple[Tokenizer, ModelConfig]:
        tokenizer = setup.tokenizer_of(self.config)
        return tokenizer, setup.model_of(self.config, tokenizer)

    def _on_one_rank(self) -> Config:
        """Returns the config with one rank, and what the numbers depend on as in the run."""
        p = self.config.parallel
        return replace(
            self.config, parallel=ParallelSection(backend=p.backend, precision=p.precision)
        )

    def _batches(self, tokenizer: Tokenizer, sources: Sequence[str]) -> tuple[Iterator[Batch], int]:
        """Returns batches, and how many documents they have, including those to be dropped."""
        data, num_tokens = self.config.data, max(self.config.data.context, _BATCH_TOKENS)
        if not sources:
            loader = setup.loader_of(self.config, tokenizer)
            return loader.evaluation(num_tokens), loader.num_held_out
        opened = [
            open_source(where, tokenizer, context=data.context, seed=self.config.train.seed)
            for where in sources
        ]
        documents: Iterator[Document | Tree] = (
            source.document(index) for source in opened for index in range(len(source))
        )
        if data.overlong == "drop":
            documents = (one for one in documents if one.longest_row <= data.context)
        return in_batches(documents, data.context, num_tokens), sum(map(len, opened))


def _first(
    batches: Iterator[Batch], num_documents: int, num_tokens: int | None, show: ShowShare | None
) -> Iterator[Batch]:
    """Yields batches until there are so many tokens, and shows when each of them is done."""
    read = taken = 0
    for batch in batches:
        yield batch
        taken += batch.num_tokens
        read += sum(document.offset == 0 for document in batch.documents)
        if show is not None:
            shares = [read / num_documents, 0.0 if num_tokens is None else taken / num_tokens]
            show(min(max(shares), 1.0), taken)
        if num_tokens is not None and taken >= num_tokens:
            return


def _figures(total: float, count: int) -> dict[str, Any]:
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "targets": count}
