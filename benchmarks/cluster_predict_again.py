"""Predicts all measured steps of ``cluster_gpu.py`` again, after a change of the simulator.

    python benchmarks/cluster_predict_again.py                            rewrites the results
    python benchmarks/cluster_predict_again.py --transfer-sms 0 --out build/free

This takes no GPU: the command of a cell says which batches it had and how they were planned, and
plans are deterministic. Its ``profile`` predicts the steps, which is not that of the plans where
steps were measured without one; a cell that has none has no predictions. Sides are left as they
are whose plans are others than those that ran, because the planner has changed.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from cluster_options import RESULTS, batch_of, model_of, options_of, planners_of
from cluster_predict import predictor, transfer_sms_of, worst_tokens
from cluster_report import Cell, read_cells, write_cell
from cluster_sides import WAYS

from distca.measure.sides import plan_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--transfer-sms", type=float, help="share of SMs. Default: what NCCL may occupy on a rank"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for record in read_cells(RESULTS).values():
        cell = Cell(**record)
        predict_again(cell, options.transfer_sms)
        write_cell(cell, options.out)
        print(cell.key, flush=True)


def predict_again(cell: Cell, transfer_sms: float | None = None) -> None:
    """Replaces the predicted seconds of all steps of a cell.

    transfer_sms: the share of SMs that transfers occupy; None for that of the cell's set-up.
    """
    about = cell.about
    command, _, _ = about["command"].partition(" (")  # without the remark in parentheses
    options = options_of(shlex.split(command)[2:])
    config = model_of(options)
    if transfer_sms is None:
        transfer_sms = transfer_sms_of(options.ranks, about["SMs"])
    predict = predictor(
        about["profile"] or None,
        config,
        options.ranks,
        recompute=about["recompute"],
        transfer_sms=transfer_sms,
    )
    for name, side in cell.ran.items():
        way = WAYS[name]
        if way is None:
            continue
        choices = planners_of(options, config, way)
        batches = (batch_of(options, seed) for seed in range(len(side["seconds"])))
        plans = [plan_step(choices, batch).plan for batch in batches]
        if [plan.num_bytes for plan in plans] != side["bytes"]:
            print(f"{cell.key}: {name} has other plans now, and keeps its predictions", flush=True)
            continue
        side["predicted"] = [predict(plan, choices[0].parallel) for plan in plans]
        side["worst_tokens"] = [worst_tokens(plan) for plan in plans]


if __name__ == "__main__":
    main()
