"""torchtitan's Trainer on gloo: the same losses and gradient norms as with its own attention.

Its own attention is ``ScaledDotProductAttention`` if every row is one document. For packed
documents it is the varlen layer with a loop over documents instead of the kernel, which has no CPU
version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distca.runtime.launch import launch

if TYPE_CHECKING:
    from integrations import torchtitan_bodies as bodies
    from ranks import RankPool
else:
    pytest.importorskip(
        "torchtitan",
        reason="torchtitan is not installed: pip install 'distca[torchtitan]' in a venv of its own",
    )
    from integrations import torchtitan_bodies as bodies

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "torchtitan_pretrain.py"
PACKED = {"training.global_batch_size": 4}  # two micro-batches per step
VALIDATION = {
    "validator.enable": True,
    "validator.freq": 2,
    "validator.steps": 2,
    "validator.dataloader.dataset": "texts",
}
TENSOR = {"parallelism.tensor_parallel_degree": 2}
PIPELINE = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "training.local_batch_size": 2,
}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("own", "none", {}),
    "accumulated, selective, validated": ("own", "selective", PACKED | VALIDATION),
    "two rows, full": ("own", "full", {"training.local_batch_size": 2}),
    "a window": ("own", "none", {"window": (99, 0)}),
    "replicated": ("own", "none", {"parallelism.data_parallel_replicate_degree": 2}),
    "whole rows": ("sdpa", "none", {"dataloader.dataset": "long"}),
}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    yield from _pool(4)


def _pool(size: int) -> Iterator[RankPool]:
    from ranks import RankPool

    pool = RankPool(size)
    yield pool
    pool.close()


def same(run: bodies.Trained, own: bodies.Trained, steps: int = 3) -> None:
    assert len(run.steps) == len(own.steps) == steps
    for mine, theirs in zip(run.steps, own.steps, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert run.validated == pytest.approx(own.validated, rel=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_same_losses_and_gradient_norms(two: RankPool, name: str) -> None:
    attention, checkpointing, options = RUNS[name]
    own = two.run(bodies.trained, attention, checkpointing, options, ranks=2)
    distca = two.run(bodies.trained, "distca", checkpointing, options, ranks=2)
    for rank in (0, 1):
        same(distca[rank], own[rank])
    micro_batches = 6 if "training.global_batch_size" in options else 3
    assert [run.gatherings for run in distca] == [micro_batches + 1] * 2  # one is read ahead
    exchanges = 3 * (6 if checkpointing == "full" else 4) * micro_batches
    if name == "whole rows":
        assert distca[0].exchanges == 0  # the load is balanced
    else:
        assert 0 < distca[0].exchanges <= exchanges


def test_planned_when_needed(two: RankPool) -> None:
    own = two.run(bodies.trained, "own", "full", {}, ranks=2)
    distca = two.run(bodies.trained, "distca, not ahead", "full", {}, ranks=2)
    same(distca[0], own[0])
    assert [run.gatherings for run in distca] == [3, 3]  # neither per layer nor in recomputation


@pytest.mark.parametrize("options", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_ranks_with_the_same_heads_and_layers(four: RankPool, options: dict[str, Any]) -> None:
    own = four.run(bodies.trained, "own", "none", options, ranks=4)
    distca = four.run(bodies.trained, "distca", "none", options, ranks=4)
    for rank in range(4):
        same(distca[rank], own[rank])
        assert distca[rank].exchanges


def test_nobody_to_share_with(two: RankPool) -> None:
    own = two.run(bodies.trained, "own", "none", TENSOR, ranks=2)
    distca = two.run(bodies.trained, "distca", "none", TENSOR, ranks=2)
    same(distca[0], own[0])
    assert (distca[0].exchanges, distca[0].gatherings) == (0, 0)


@pytest.mark.parametrize(("dataset", "steps", "fillers"), [("few", 8, 6), ("none", 2, 2)])
def test_loaders_that_end_at_different_times(
    two: RankPool, dataset: str, steps: int, fillers: int
) -> None:
    options = {"dataloader.dataset": dataset, "dataloader.infinite": False, "training.steps": 50}
    runs = two.run(bodies.trained, "distca", "none", options, ranks=2)
    assert runs[0].steps == runs[1].steps
    assert len(runs[0].steps) == steps
    assert [run.fillers for run in runs] == [1, fillers + 1]  # the last tells that all have ended


def test_resumes_where_it_was(two: RankPool, tmp_path: Path) -> None:
    for first, again in two.run(bodies.resumed, str(tmp_path), ranks=2):
        assert len(again) == 2
        for mine, theirs in zip(again, first[2:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


def test_plan_options(two: RankPool) -> None:
    limits = {"speed": [1.0, 0.5], "memory_bytes": 1 << 30}
    for devices in two.run(bodies.devices_of, limits, ranks=2):
        assert devices[0] == {"node": [0, 1], "speed": [1.0, 0.5], "memory_bytes": [1 << 30] * 2}


def test_all_ranks_raise_the_error_of_one(two: RankPool) -> None:
    (first, waited), (second, _) = two.run(bodies.wrong_on_one, ranks=2)
    assert "cumulative lengths [0, 20, 63] for 64 tokens" in second
    assert first.startswith("rank 1 cannot take part: attention layer 0")
    assert waited < 10


def test_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    launch([sys.executable, str(EXAMPLE)], 2, tmp_path / "logs")
    said = capfd.readouterr()
    losses = [float(loss) for loss in re.findall(r"loss: +([0-9.]+)", said.out + said.err)]
    assert len(losses) == 5
    assert losses[-1] < 6 < losses[0]
    figures = re.findall(
        r"distca: imbalance ([0-9.]+)x without and ([0-9.]+)x", said.out + said.err
    )
    assert len(figures) == 5
    assert all(float(after) <= float(before) for before, after in figures)
