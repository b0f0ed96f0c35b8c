"""One step with shared prompts against a plain loop over all rows: loss, and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import World
from runtime.bodies import TINY, Case, one_step, plain_loop
from runtime.test_gradients import BALANCED, PING_PONG, assert_equal_steps

from distca.data.documents import Batch, Document
from distca.data.tokenizers import open_tokenizer
from distca.data.trees import read_tree
from distca.pipeline.mesh import MeshShape

IDS = open_tokenizer("ids:61")
CASES: dict[str, Case] = {
    "alone": Case(),
    "dp2, colocated": Case(MeshShape(dp=2), policy="colocated"),
    "dp2, ping-pong, balanced": Case(MeshShape(dp=2), **PING_PONG, **BALANCED),
    "dp2, windows": Case(MeshShape(dp=2), replace(TINY, window=20, window_pattern=2), **BALANCED),
    "2 + 1 server": Case(MeshShape(dp=2, servers=1)),
    "pp2": Case(MeshShape(pp=2), micro_batches=2),
}
OTHERS: dict[str, Case] = {
    "cp2": Case(MeshShape(cp=2)),
    "tp2": Case(MeshShape(tp=2)),
    "dp2, three micro-batches": Case(MeshShape(dp=2), micro_batches=3),
    "dp2 x tp2, balanced": Case(MeshShape(dp=2, tp=2), **BALANCED),
    "dp4, balanced": Case(MeshShape(dp=4), **BALANCED),
    "dp2 x cp2, ping-pong": Case(MeshShape(dp=2, cp=2), **PING_PONG),
    "pp2 x dp2, ping-pong, balanced": Case(
        MeshShape(pp=2, dp=2), micro_batches=2, **PING_PONG, **BALANCED
    ),
}


def tree_of(rng: np.random.Generator, prompt: int, completions: list[Any]) -> dict[str, Any]:
    """Returns a tree of random tokens. completions: lengths, or arguments of other trees."""
    below: list[Any] = []
    for one in completions:
        of_numbers = isinstance(one, int)
        below.append(rng.integers(0, 61, one).tolist() if of_numbers else tree_of(rng, *one))
    return {"prompt": rng.integers(0, 61, prompt).tolist(), "completions": below}


def rows_of(tree: dict[str, Any], before: tuple[int, ...] = ()) -> list[tuple[int, list[int]]]:
    """Returns the number of prompt tokens and all tokens of each row."""
    before = (*before, *tree["prompt"])
    rows = []
    for one in tree["completions"]:
        if isinstance(one, list):
            rows.append((len(before), [*before, *one]))
        else:
            rows += rows_of(one, before)
    return rows


def batches() -> tuple[Batch, Batch]:
    """Returns documents with shared prompts, and the same rows one by one."""
    rng = np.random.default_rng(0)
    trees = [
        tree_of(rng, 60, [9, 30, 2, 17]),
        tree_of(rng, 11, [(20, [5, 40]), 8, (3, [1, (4, [6, 7])])]),
        tree_of(rng, 90, [3, 3]),
        tree_of(rng, 1, [12]),
    ]
    alone = [Document.from_tokens(rng.integers(0, 61, length)) for length in (33, 70, 5)]
    shared = [
        document
        for index, tree in enumerate(trees)
        for document in read_tree(tree, IDS, "a tree", index).documents
    ]
    rows = [
        Document.from_tokens(tokens, num_prompt=known)
        for tree in trees
        for known, tokens in rows_of(tree)
    ]
    return Batch((*shared[:4], alone[0], *shared[4:], *alone[1:])), Batch((*rows, *alone))


def check(world: World, case: Case) -> None:
    shared, rows = batches()
    assert shared.num_targets == rows.num_targets
    assert shared.num_tokens + shared.num_saved == rows.num_tokens
    assert shared.num_saved > 0.4 * rows.num_tokens
    ranks = case.parallel.num_ranks
    answers = world(ranks).run(one_step, case, shared, ranks=ranks)
    assert_equal_steps(case, answers, plain_loop(case, rows), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_that_of_the_rows(world: World, name: str) -> None:
    check(world, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_one_step_is_that_of_the_rows_on_other_meshes(world: World, name: str) -> None:
    check(world, OTHERS[name])


def test_policies_that_do_not_know_prefixes_say_so() -> None:
    shared, _ = batches()
    planner = Case(MeshShape(cp=2), policy="head-tail-cp").planner()
    with pytest.raises(ValueError, match="placer head-tail does not know documents that continue"):
        planner.plan(shared.lengths, prefixes=shared.prefixes)
