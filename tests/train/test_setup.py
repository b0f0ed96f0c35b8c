"""What a run is made of, from its config."""

from __future__ import annotations

import pytest
import torch

from distca.model.sizes import model_config
from distca.pipeline.mesh import MeshShape
from distca.train.config import Config
from distca.train.setup import planner_of


@pytest.mark.parametrize(("device", "cost"), [("cuda", "h200"), ("cpu", "cpu")])
def test_tasks_are_priced_for_the_device(device: str, cost: str) -> None:
    planner = planner_of(Config(), MeshShape(), model_config("debug"), torch.device(device))
    assert planner.plan_options.cost.name == cost
