"""From a config to the components of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distca.data.shuffle import choose_held_out
from distca.model.checkpoints import check_folder, save
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Llama
from distca.model.sizes import model_config
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.devices import UNLIMITED, Devices
from distca.planning.spans import as_ints
from distca.train.config import Config
from distca.train.setup import loader_of, model_of, planner_of, tokenizer_of


def planner(parallel: MeshShape, *settings: str, ranks_per_node: int | None = None) -> StepPlanner:
    config = Config.read(None, [f"parallel.{setting}" for setting in settings])
    model, device = model_config("debug"), torch.device("cpu")
    return planner_of(config, parallel, model, device, ranks_per_node)


def devices(parallel: MeshShape, *settings: str, ranks_per_node: int | None = None) -> Devices:
    """The devices of a plan of the trainer's planner."""
    step = planner(parallel, *settings, ranks_per_node=ranks_per_node)
    return step.plan(as_ints([300, 200, 100, 50])).slots[0][0][0].devices


def test_the_tokens_around_documents_can_be_set() -> None:
    config = Config.read(None, ["data.add_bos=true", "data.add_eos=false"])
    assert tokenizer_of(config).document("a").tokens.tolist() == [256, 97]
    assert tokenizer_of(Config.read(None, ["data.tokenizer=ids:9", "data.eos=7"])).eos == 7


def test_too_few_tokens_of_a_model_are_advised_what_works(tmp_path: Path) -> None:
    """The vocabulary of weights cannot be set."""
    sizes = ["model.sizes={hidden = 8, heads = 2, kv_heads = 1, head_dim = 4, vocab_size = 9}"]
    config = Config.read(None, sizes)
    words = r"tokenizer bytes has 259 tokens, but model debug only 9: set model.sizes.vocab_size$"
    with pytest.raises(ValueError, match=words):
        model_of(config, tokenizer_of(config))
    model = Llama(ModelConfig(9, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16))
    initialize(model, 0)
    save(model, tmp_path)
    config = Config.read(None, [f"model.path={tmp_path}"])
    with pytest.raises(ValueError, match=r"only 9: set data\.tokenizer to that of the checkpoint"):
        model_of(config, tokenizer_of(config))
    config = Config.read(None, [f"model.path={tmp_path}", "model.sizes={vocab_size = 300}"])
    words = "has vocab_size 9 not 300: keep what its config.json says, by leaving these out of mod"
    with pytest.raises(ValueError, match=words):
        check_folder(model_of(config, tokenizer_of(config)), tmp_path)


def test_an_evaluation_needs_a_target(tmp_path: Path) -> None:
    """Documents of one token, which are those that are held out."""
    held = choose_held_out([60], 3)[0].tolist()
    lines = [json.dumps({"tokens": [1] * (1 if index in held else 50)}) for index in range(60)]
    (tmp_path / "ids.jsonl").write_text("\n".join(lines))
    settings = [f"data.sources={tmp_path}/ids.jsonl", "data.tokenizer=ids:9", "data.held_out=3"]
    config = Config.read(None, settings)
    loader_of(config, tokenizer_of(config))
    config = Config.read(None, [*settings, "train.eval_every=1"])
    with pytest.raises(ValueError, match="the first 3 tokens of held-out documents have no target"):
        loader_of(config, tokenizer_of(config))


@pytest.mark.parametrize(("device", "cost"), [("cuda", "h200"), ("cpu", "cpu")])
def test_tasks_are_priced_for_the_device(device: str, cost: str) -> None:
    mesh, model = MeshShape(), model_config("debug")
    found = planner_of(Config(), mesh, model, torch.device(device)).plan_options.cost
    assert not isinstance(found, str)
    assert found.name == cost


def test_plans_know_which_ranks_share_a_node() -> None:
    assert devices(MeshShape(dp=4)).node.tolist() == [0, 0, 0, 0]
    assert devices(MeshShape(dp=4), ranks_per_node=2).node.tolist() == [0, 0, 1, 1]
    # Of four ranks on a node, two have the same tensor-parallel index.
    assert devices(MeshShape(dp=4, tp=2), ranks_per_node=4).node.tolist() == [0, 0, 1, 1]
    given = devices(MeshShape(dp=4), "ranks_per_node=3", ranks_per_node=4)
    assert given.node.tolist() == [0, 0, 0, 1]
    assert devices(MeshShape(dp=2, servers=2), ranks_per_node=4).node.tolist() == [0, 0, 0, 0]


def test_speeds_and_memory_limits_reach_the_plans() -> None:
    plain = devices(MeshShape(dp=2))
    assert plain.speed.tolist() == [1.0, 1.0]
    assert plain.memory_bytes.tolist() == [UNLIMITED] * 2
    told = devices(MeshShape(dp=2), "speed=[1.0, 0.5]", "attention_memory_gib=0.5")
    assert told.speed.tolist() == [1.0, 0.5]
    assert told.memory_bytes.tolist() == [1 << 29] * 2
    with pytest.raises(ValueError, match="3 speeds for 2 plan ranks: give one for each, or none"):
        devices(MeshShape(dp=2), "speed=[1, 1, 1]")


@pytest.mark.parametrize(
    ("parallel", "workers"), [(MeshShape(dp=4), 1), (MeshShape(dp=2, cp=2), 2)]
)
def test_context_parallel_policies_deal_documents_over_the_groups_of_the_mesh(
    parallel: MeshShape, workers: int
) -> None:
    step = planner(parallel, "policy=head-tail-cp", "placement=given").plan(as_ints([64] * 4))
    placement = step.micro_batches[0][0].placement
    for document in range(4):
        assert len(set(placement.worker[placement.document == document])) == workers
