"""The load balancers of PyTorch's context parallelism, and a placement of distca in their place.

    python benchmarks/torch_balancers.py        a minute on one core; computes no attention

A load balancer of ``torch.distributed.tensor.experimental`` is a permutation of the tokens of a
row, of which each rank gets an equal part. With ``flex_attention`` every rank then gathers all keys
and values, and computes the blocks of 128 x 128 query-key pairs in which its queries see a key.
Both are counted here: blocks of the busiest rank over the mean, and bytes that all ranks receive in
the forward pass of a layer of Llama-3-8B in bfloat16. The last row is what distca computes by plans
of its own, outside of torch's context parallelism, counted in pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import create_block_mask

import distca
from distca.data.lengths import distribution
from distca.planning.models import model_shape

MODEL, BLOCK = "llama3-8b", 128
BATCHES = [("pretrain", 8192, 2, 1), ("pretrain", 8192, 4, 2), ("prolong", 8192, 4, 3)]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, object]


def main() -> None:
    rows = [row for batch in BATCHES for row in compared(*batch)]
    text = report(rows)
    print(text)
    RESULTS.joinpath("torch_balancers.md").write_text(text)
    RESULTS.joinpath("torch_balancers.json").write_text(json.dumps(rows, indent=1) + "\n")


def compared(lengths: str, tokens: int, ranks: int, seed: int) -> list[Row]:
    documents = distribution(lengths, tokens).batch(tokens, seed=seed).tolist()
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    mask = create_block_mask(
        lambda b, h, q, k: (document[q] == document[k]) & (q >= k), 1, 1, tokens, tokens, "cpu"
    )
    orders = {
        "none": torch.arange(tokens),
        "head-tail": _HeadTailLoadBalancer(tokens, ranks, "cpu")._generate_indices()[0].long(),
        "PTRR": _PTRRLoadBalancer(mask, ranks)._generate_indices()[0],
        "distca's placement": placed(documents, ranks),
    }
    shape = model_shape(MODEL)
    gathered = (ranks - 1) * tokens * 2 * shape.kv_heads * shape.head_dim * 2
    about = {"documents": f"{lengths}, {len(documents)}, longest {max(documents)}", "ranks": ranks}
    rows: list[Row] = []
    for name, order in orders.items():
        blocks = visible_blocks(order, document[order], ranks)
        worst = blocks.max() / blocks.mean()
        total = {"blocks": int(blocks.sum()), "MB": gathered / 1e6}
        rows.append(about | {"balancer": name, "worst / mean": float(worst)} | total)
    pairs = {"model": MODEL, "cost": "pairs"}
    plan = distca.plan(distca.place(documents, ranks, **pairs), **pairs)
    of_plan = {"worst / mean": plan.imbalance, "blocks": "", "MB": plan.traffic.total / 1e6}
    return [*rows, about | {"balancer": "distca without torch's"} | of_plan]


def placed(documents: Sequence[int], ranks: int) -> Tensor:
    """Returns balanced placement as a load balancer would: rank by rank, equally many tokens.

    They are equal with tiles of one token only, so that blocks hold parts of several documents.
    """
    placement = distca.place(documents, ranks, model=MODEL, cost="pairs", tile=1, min_shard=1)
    assert len(set(placement.tokens.tolist())) == 1
    first = np.cumsum([0, *documents])[placement.document]
    spans = zip(first + placement.start, first + placement.stop, strict=True)
    return torch.cat([torch.arange(*span) for span in spans])


def visible_blocks(position: Tensor, document: Tensor, ranks: int) -> np.ndarray:
    """Returns the number of blocks that each rank computes."""
    found = []
    for queries in torch.arange(len(position)).split(len(position) // ranks):
        sees = document[queries, None] == document
        sees &= position[queries, None] >= position
        of_blocks = sees.view(len(queries) // BLOCK, BLOCK, -1, BLOCK)
        found.append(int(of_blocks.any(3).any(1).sum()))
    return np.array(found)


def report(rows: list[Row]) -> str:
    lines = [
        "# Load balancers of PyTorch's context parallelism",
        "",
        f"`python benchmarks/torch_balancers.py`, {date.today()}, torch {torch.__version__}. Rows"
        " of 8,192 tokens. The top of the script says how it is counted.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
    ]
    for row in rows:
        shown = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
