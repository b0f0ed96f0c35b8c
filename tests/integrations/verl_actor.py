"""Functions that ranks run in the tests of verl: updates of an actor in its FSDP engine.

verl has no platform for CPUs, but accepts those of others: ``PlatformCpu`` is one for these tests.
Its engine needs a GPU for FSDP1 (``sync_module_states``), so FSDP2 is tested.
"""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from integrations.counting import counted
from integrations.tiny import VOCAB, model_of
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

PROMPTS = ([30, 7, 50, 12], [5, 21, 9, 40])  # of each rank
RESPONSES = ([400, 3, 170, 25], [20, 8, 2, 40])
MICRO_BATCH_TOKENS = 512  # the first rank has more tokens than this


class PlatformCpu(PlatformCUDA):  # type: ignore[misc]
    device_name, device_module = "cpu", torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


class Updated(NamedTuple):
    """What the updates of an actor have computed on one rank."""

    old_log_probs: Tensor
    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]  # of the first update
    sent_bytes: int


def update(group: dist.ProcessGroup, attention: str, name: str, options: dict[str, Any]) -> Updated:
    """Computes old log-probabilities, and updates an actor twice with verl's PPO loss.

    options: fields of verl's engine config.
    """
    set_platform(PlatformCpu())
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    with tempfile.TemporaryDirectory() as folder:
        model_of(name).save_pretrained(folder)
        engine = engine_of(folder, attention, options)
    data = rollouts(dist.get_rank())
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)

    def loss(**given: Any) -> Any:
        return ppo_loss(actor, **given)

    with engine.eval_mode():
        found = engine.infer_batch(data.clone())["model_output"]["log_probs"]
    tu.assign_non_tensor(data, calculate_entropy=True)
    old = responses_of(found, data)
    data["old_log_probs"] = old
    losses, norms, grads = [], [], {}
    with engine.train_mode(), counted() as exchanges:
        for _ in range(2):
            outputs = engine.train_batch(data.clone(), loss)
            losses.append(sum(outputs["loss"]))
            norms.append(outputs["metrics"]["grad_norm"])
            whole = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
            grads = grads or whole
    return Updated(old, losses, norms, grads, sum(exchanges))


def engine_of(folder: str, attention: str, options: dict[str, Any]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        external_lib="distca.integrations.verl" if attention == "distca" else None,
        override_config={"attn_implementation": attention},
    )
    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    given = {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": float32}
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, weight_decay=0.0)
    engine = FSDPEngineWithLMHead(
        model, FSDPEngineConfig(**given | options), optimizer, CheckpointConfig()
    )
    engine.initialize()
    return engine


def rollouts(rank: int) -> TensorDict:
    """Returns prompts and responses as verl's trainer gives them to an actor."""
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(rank)
    prompts, responses = (
        [torch.randint(1, VOCAB, (length,), generator=draw) for length in lengths[rank]]
        for lengths in (PROMPTS, RESPONSES)
    )
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(one) for one in responses]
    advantages = [torch.randn(len(one), generator=draw) for one in responses]
    data = TensorDict(
        {
            "input_ids": jagged(rows),
            "position_ids": jagged([torch.arange(len(row)) for row in rows]),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(masks),
            "loss_mask": jagged(masks),
            "advantages": jagged(advantages),
        },
        batch_size=[len(rows)],
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=MICRO_BATCH_TOKENS,
        global_batch_size=sum(map(len, PROMPTS)),
    )
    return data


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def responses_of(log_probs: Tensor, data: TensorDict) -> Tensor:
    """Returns the log-probabilities of the tokens of responses, each predicted one token before."""
    lengths = data["responses"].offsets().diff().tolist()
    rows = zip(log_probs.unbind(), lengths, strict=True)
    return jagged([row[len(row) - length - 1 : -1] for row, length in rows])
