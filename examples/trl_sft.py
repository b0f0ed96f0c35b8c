"""Fine-tunes a small Llama with TRL's SFTTrainer on packed conversations; ranks share attention.

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import random

import tokenizers as tok
import torch
import transformers as hf
import trl
from datasets import Dataset

from distca.integrations.transformers import register

distca = register()  # registers attn_implementation="distca"
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = hf.LlamaConfig(**sizes, **heads)
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="distca")

vocabulary = {f"w{number}": number for number in range(256)}
raw = tok.Tokenizer(tok.models.WordLevel(vocabulary, unk_token="w0"))
raw.pre_tokenizer = tok.pre_tokenizers.WhitespaceSplit()
tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w1", pad_token="w2")

draw = random.Random(0)
lengths = [draw.choice([20, 50, 100, 1000]) for _ in range(40)]
texts = [" ".join(f"w{draw.randrange(3, 256)}" for _ in range(length)) for length in lengths]
rows = [{"prompt": text[:60], "completion": text[60:]} for text in texts]

trainer = trl.SFTTrainer(
    model,
    trl.SFTConfig(
        "runs/trl",
        packing=True,
        max_length=1024,
        per_device_train_batch_size=2,
        max_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
distca.adopt(trainer)  # plans the next batch during this one, and adds figures to the logs
trainer.train()
