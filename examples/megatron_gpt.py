"""Trains a small GPT of Megatron-Core on packed documents; data-parallel ranks share attention.

torchrun --nproc-per-node 2 examples/megatron_gpt.py
"""

from itertools import accumulate

import torch
from megatron.core import distributed, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from distca.integrations.megatron import DistcaDotProductAttention

torch.distributed.init_process_group()
rank, cuda = torch.distributed.get_rank(), torch.cuda.is_available()
torch.set_default_device(torch.device("cuda", rank % torch.cuda.device_count()) if cuda else "cpu")
if not cuda:  # Megatron-Core itself needs a GPU
    from megatron_on_cpu import stay_on_cpu

    stay_on_cpu()
parallel_state.initialize_model_parallel()
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
no_dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
config = TransformerConfig(**sizes, **no_dropout, use_cpu_initialization=True)
spec = gpt_layer_specs.get_gpt_layer_local_spec()
spec.submodules.self_attention.submodules.core_attention = DistcaDotProductAttention  # distca
model = GPTModel(config, spec, 256, 1000, position_embedding_type="rope")
ddp = distributed.DistributedDataParallelConfig()
model = distributed.DistributedDataParallel(config, ddp, model.to(torch.get_default_device()))
adam = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.0), [model])
for step in range(5):
    lengths = [1000] if (step + rank) % 2 else [200, 50, 600, 150]  # documents of 1000 tokens
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=1000, max_seqlen_kv=1000)
    tokens, positions = torch.randint(256, (1, 1000)), torch.arange(1000)[None]
    model.zero_grad_buffer()
    loss = model(tokens, positions, None, labels=tokens, packed_seq_params=packed).mean()
    loss.backward()
    model.finish_grad_sync()
    adam.step()
    print(f"step {step} rank {rank} loss {loss.item():.4f}")
figures = DistcaDotProductAttention.take_figures()  # of this rank, for any log
print(f"rank {rank}", *(f"{name} {value:.3g}" for name, value in figures.items()))
