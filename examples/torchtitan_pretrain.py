"""Trains torchtitan's small Llama on packed documents; all ranks share its attention.

torchrun --nproc-per-node 2 examples/torchtitan_pretrain.py
"""

import random
import tempfile

import torch
import torchtitan_on_cpu  # before torchtitan; it changes nothing where there is a GPU
from datasets import Dataset
from tokenizers import Tokenizer, models
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn
from torchtitan.tools.logging import init_logger

from distca.integrations.torchtitan import adopt

draw = random.Random(0)
lengths = [draw.choice([20, 50, 100, 1000]) for _ in range(200)]
texts = [{"text": "".join(draw.choices("abcdefgh", k=length))} for length in lengths]
DATASETS["texts"] = DatasetConfig("", lambda _: Dataset.from_list(texts), lambda row: row["text"])
assets = tempfile.mkdtemp()
Tokenizer(models.BPE({chr(code): code for code in range(256)}, [])).save(f"{assets}/tokenizer.json")

init_logger()
config = adopt(llama3_debugmodel_varlen_attn())  # the only line about distca
config.hf_assets_path, config.dataloader.dataset = assets, "texts"
config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 1024, 5
config.checkpoint.enable = config.validator.enable = False
config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch than 2.13
if not torch.cuda.is_available():
    config.training.mixed_precision_param = "float32"
    torchtitan_on_cpu.stay_on_cpu()
trainer = config.build()
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
