"""Trains a small Llama on packed documents with transformers' Trainer; all ranks share attention.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import random

import torch
import transformers as hf

from distca.integrations.transformers import register

distca = register()  # registers attn_implementation="distca"
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = hf.LlamaConfig(**sizes, **heads)
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="distca")

draw = random.Random(0)
lengths = [draw.choice([20, 50, 100, 1000]) for _ in range(40)]
documents = [{"input_ids": [draw.randrange(256) for _ in range(length)]} for length in lengths]
trainer = hf.Trainer(
    model,
    hf.TrainingArguments(
        "runs/transformers",
        max_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=documents,
    data_collator=hf.DataCollatorWithFlattening(),  # packs: position_ids restart
)
distca.adopt(trainer)  # plans the next batch during this one, and adds figures to the logs
trainer.train()
