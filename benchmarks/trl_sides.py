"""The sides of trl_speed.py: trainers of TRL, their data and their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distca.data.lengths import distribution

SCRATCH = Path("runs/trl")
COMPLETIONS = 8  # of a prompt, on each rank
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding-free": {"padding_free": True, "max_length": None},
    "packing": {"packing": True, "per_device_train_batch_size": 1},
}
# Attention has about the share of the time that it has in Llama-3-8B at 47K (CPU) or 29K tokens.
CPU = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64,
       "num_key_value_heads": 4, "vocab_size": 1024}  # fmt: skip
GPU = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "head_dim": 128,
       "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


class Case(NamedTuple):
    trainer: str
    lengths: str  # of documents (SFT) or completions (GRPO)
    context: int  # the longest of them
    prompt: int = 0  # tokens, in GRPO


class Side(NamedTuple):
    mode: str
    attention: str


def trainer_of(case: Case, side: Side, steps: int, layers: int, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    gpu = device.type == "cuda"
    sizes = (GPU if gpu else CPU) | {"num_hidden_layers": layers}
    config = LlamaConfig(**sizes, max_position_embeddings=1 << 17, pad_token_id=0)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=side.attention,
            dtype=torch.bfloat16 if gpu else torch.float32,
        )
    given = {
        "output_dir": str(SCRATCH / "trainer"),
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not gpu,
        "bf16": False,  # the weights are, on a GPU
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "train_sampling_strategy": "sequential",
    }
    return (sft if case.trainer == "SFT" else grpo)(case, side.mode, steps, model, given)


def sft(case: Case, mode: str, steps: int, model: Any, given: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rng = np.random.default_rng(0)
    lengths = distribution(case.lengths, case.context)
    size = max(case.context // int(lengths.sample(10_000, rng).mean()), 1)
    # Twice what is needed, since packing may fill rows with more documents.
    documents = lengths.sample(2 * steps * size * dist.get_world_size(), rng)
    tokens = [rng.integers(1, model.config.vocab_size, length).tolist() for length in documents]
    options = {"max_length": case.context, "per_device_train_batch_size": size} | MODES[mode]
    return SFTTrainer(
        model,
        # Packing sorts documents by length, so that rows have to be shuffled.
        SFTConfig(**given, **options, shuffle_dataset=True),
        train_dataset=Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in tokens]),
        processing_class=tokenizer(model.config.vocab_size),
    )


def grpo(case: Case, mode: str, steps: int, model: Any, given: dict[str, Any]) -> Any:
    """One prompt for each rank and update, with completions that are given."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    words, rng = model.config.vocab_size, np.random.default_rng(0)
    num_prompts = 2 * steps * dist.get_world_size()
    prompts = rng.integers(1, words, (num_prompts, case.prompt)).tolist()
    lengths = distribution(case.lengths, case.context)
    draw = np.random.default_rng(1 + dist.get_rank())  # the same for each side

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [
            draw.integers(1, words, length).tolist() for length in lengths.sample(len(texts), draw)
        ]
        ids = trainer.processing_class(texts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 7 for ids in completion_ids]

    return GRPOTrainer(
        model,
        reward,
        GRPOConfig(
            **given,
            per_device_train_batch_size=COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=case.context,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
        ),
        processing_class=tokenizer(words),
        rollout_func=rollout,
    )


def tokenizer(words: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0} | {f"w{number}": number for number in range(1, words)}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="w1")
