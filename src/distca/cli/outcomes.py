"""Plain records of simulated strategies, for ``distca.report`` and ``--json``."""

from dataclasses import asdict
from typing import Any

from distca.sim.scenario import Scenario
from distca.sim.simulate import Summary
from distca.sim.sweep import SweepResult
from distca.sim.verdict import Verdict


def scenario_record(scenario: Scenario, batches: int) -> dict[str, Any]:
    """Returns what is the same for all numbers of GPUs."""
    lengths = scenario.lengths
    return {
        "model": asdict(scenario.model),
        "cluster": asdict(scenario.cluster),
        "lengths": lengths if isinstance(lengths, str) else f"{len(lengths)} documents",
        "context": scenario.context,
        "mask": scenario.mask,
        "recompute": scenario.recompute,
        "seed": scenario.seed,
        "batches": batches,
    }


def run_record(scenario: Scenario, results: list[SweepResult], verdict: Verdict) -> dict[str, Any]:
    """Returns the results for one number of GPUs."""
    base_s = verdict.other.step_s if verdict.other else None
    return {
        "gpus": scenario.cluster.gpus,
        "sequences": scenario.sequences,
        "tokens": scenario.tokens,
        "limit_bytes": limit_bytes(scenario),
        "strategies": [_strategy_record(result, base_s) for result in results],
        "verdict": _verdict_record(verdict) | {"known": scenario.cluster.known},
    }


def limit_bytes(scenario: Scenario) -> int:
    """Returns the memory of a GPU that a step may use."""
    return scenario.cluster.usable_bytes


def _strategy_record(result: SweepResult, base_s: float | None) -> dict[str, Any]:
    if result.summary is None:
        return {"policy": result.name, "error": result.refused}
    s = result.summary
    return {
        "policy": result.name,
        "disaggregated": s.strategy.disaggregated,
        "sizes": asdict(s.strategy.parallel) | {"micro_batches": s.strategy.micro_batches},
        "sizes_text": s.strategy.sizes,
        "tried": result.tried,
        "step_s": s.step_s,
        "tokens_per_s": s.tokens_per_s,
        "tflops_per_gpu": s.tflops_per_gpu,
        "speed_up": None if base_s is None else base_s / s.step_s,
        "idle": s.idle,
        "exposed": s.exposed,
        "bytes_per_gpu": s.bytes_per_gpu,
        "memory_bytes": s.memory.total,
        "memory_gib": s.memory.table(),
        "fits": result.fits,
        "planning_s": s.planning_s,
    }


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    return {
        "pays": verdict.pays,
        "speed_up": verdict.speed_up,
        "ours": _summary_record(verdict.ours),
        "other": _summary_record(verdict.other),
        "because": verdict.because,
        "attention": verdict.attention,
        "busiest": verdict.busiest,
        "needed_bytes_per_s": verdict.needed_bytes_per_s,
    }


def _summary_record(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {
        "policy": summary.strategy.name,
        "sizes": summary.strategy.sizes,
        "idle": summary.idle,
        "exposed": summary.exposed,
    }
