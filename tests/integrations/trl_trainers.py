"""Functions that ranks run in the tests of TRL: SFT, GRPO and DPO, and what they compute."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from integrations.counting import counted
from integrations.tiny import VOCAB, features, model_of
from integrations.trainers import mark
from torch import Tensor

from distca.integrations.transformers import register

# Long and short rows, in the order in which ranks take them.
DOCUMENTS = [200, 9, 33, 90, 150, 20, 100, 5, 64, 2, 70, 128]
COMPLETIONS = [60, 3, 17, 25, 90, 8, 2, 40, 30, 11, 5, 50]


class Stepped(NamedTuple):
    """What the steps of a trainer have computed on one rank."""

    losses: list[float]
    norms: list[float]  # of all gradients, after each step
    grads: dict[str, Tensor]  # of the first step
    exchanges: int
    tokens: int  # that the model was given in steps with gradients
    logged: dict[str, float]  # of the last step


def sft(group: dist.ProcessGroup, attention: str, name: str, options: dict[str, Any]) -> Stepped:
    """Prompts and completions: only the latter are in the loss."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{**row, "labels": with_prompt(row["input_ids"])} for row in features(DOCUMENTS)]

    def make(folder: str, common: dict[str, Any]) -> Any:
        given = {"max_length": 256, "shuffle_dataset": False} | common | options
        arguments = SFTConfig(folder, per_device_train_batch_size=2, **given)
        return SFTTrainer(
            model_of(name, attention),
            arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    return stepped(attention, make)


def with_prompt(tokens: list[int]) -> list[int]:
    """Returns labels; the first third is a prompt, which has none."""
    start = len(tokens) // 3
    return [-100] * start + tokens[start:]


def grpo(group: dist.ProcessGroup, attention: str, name: str, options: dict[str, Any]) -> Stepped:
    """Two prompts for each rank, with four completions each, which are given or generated."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    size = dist.get_world_size()
    prompts = [{"prompt": words(row["input_ids"])} for row in features([30, 7, 50, 12, 21, 40])]
    prompts = prompts[: 2 * size]
    generates = options.get("max_completion_length") is not None

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        """Returns the same uneven completions in every run; ranks have others."""
        lengths = [COMPLETIONS[i] * (1 if dist.get_rank() else 3) for i in range(len(texts))]
        ids = trainer.processing_class(texts)["input_ids"]
        found = features(lengths, seed=dist.get_rank())
        completions = [row["input_ids"] for row in found]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 7 + len(ids) / 10 for ids in completion_ids]

    def make(folder: str, common: dict[str, Any]) -> Any:
        given = {"num_generations": 4, "shuffle_dataset": False, "temperature": 1.0} | common
        arguments = GRPOConfig(folder, per_device_train_batch_size=8, **given | options)
        return GRPOTrainer(
            saved(name, attention, folder),
            reward,
            arguments,
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer(),
            rollout_func=None if generates else rollout,
        )

    return stepped(attention, make)


def dpo(group: dist.ProcessGroup, attention: str, name: str, options: dict[str, Any]) -> Stepped:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    parts = {"prompt": DOCUMENTS, "chosen": COMPLETIONS, "rejected": COMPLETIONS[::-1]}
    texts = {
        name: [words(row["input_ids"]) for row in features(lengths, seed)]
        for seed, (name, lengths) in enumerate(parts.items())
    }

    def make(folder: str, common: dict[str, Any]) -> Any:
        arguments = DPOConfig(folder, per_device_train_batch_size=2, **common | options)
        return DPOTrainer(
            saved(name, attention, folder),
            args=arguments,
            train_dataset=Dataset.from_dict(texts),
            processing_class=tokenizer(),
        )

    return stepped(attention, make)


def stepped(attention: str, make: Callable[[str, dict[str, Any]], Any]) -> Stepped:
    """Returns what three steps of a trainer compute."""
    from transformers import TrainerCallback

    mark(dist.get_rank(), dist.get_world_size())
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    one = register(cost="pairs")
    common = {
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "optim": "sgd",
    }
    found: list[dict[str, Tensor]] = []
    tokens = 0

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            found.append({key: p.grad.clone() for key, p in model.named_parameters()})

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal tokens
        tokens += kwargs["input_ids"].numel() if torch.is_grad_enabled() else 0

    with tempfile.TemporaryDirectory() as folder, counted() as sent:
        trainer = make(folder, common)
        trainer.add_callback(Watch())
        if attention == "distca":
            one.adopt(trainer)
        trainer.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(torch.stack([g.norm() for g in one.values()]).norm()) for one in found]
    return Stepped([e["loss"] for e in logged], norms, found[0], len(sent), tokens, logged[-1])


def saved(name: str, attention: str, folder: str) -> Any:
    """Returns a model from a folder, from which trainers load a reference model."""
    from transformers import AutoModelForCausalLM

    model_of(name, "sdpa").save_pretrained(folder)  # which saves on the first rank only
    paths = [folder]
    dist.broadcast_object_list(paths)
    return AutoModelForCausalLM.from_pretrained(paths[0], attn_implementation=attention)


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0} | {f"w{i}": i for i in range(1, VOCAB)}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="w1", model_max_length=1024
    )
