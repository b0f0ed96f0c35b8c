"""From simulated ways to plain records: what ``distca.report`` shows and ``--json`` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distca.sim.scenario import Scenario
from distca.sim.simulate import Summary
from distca.sim.sweep import Found
from distca.sim.verdict import Verdict


def scenario_record(scenario: Scenario, batches: int) -> dict[str, Any]:
    """What is the same for all numbers of GPUs."""
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


def run_record(scenario: Scenario, found: list[Found], verdict: Verdict) -> dict[str, Any]:
    """One number of GPUs."""
    base = verdict.other.step_s if verdict.other else None
    return {
        "gpus": scenario.cluster.gpus,
        "sequences": scenario.sequences,
        "tokens": scenario.tokens,
        "limit_bytes": limit_bytes(scenario),
        "ways": [_way_record(one, base) for one in found],
        "verdict": _verdict_record(verdict) | {"known": scenario.cluster.known},
    }


def limit_bytes(scenario: Scenario) -> int:
    """Of a GPU's memory, that a step may use."""
    return scenario.cluster.usable_bytes


def _way_record(found: Found, base_s: float | None) -> dict[str, Any]:
    if found.summary is None:
        return {"policy": found.name, "error": found.refused}
    s = found.summary
    return {
        "policy": found.name,
        "disaggregated": s.way.disaggregated,
        "sizes": asdict(s.way.parallel) | {"micro_batches": s.way.micro_batches},
        "sizes_said": s.way.sizes,
        "tried": found.tried,
        "step_s": s.step_s,
        "tokens_per_s": s.tokens_per_s,
        "tflops_per_gpu": s.tflops_per_gpu,
        "speed_up": None if base_s is None else base_s / s.step_s,
        "idle": s.idle,
        "exposed": s.exposed,
        "bytes_per_gpu": s.bytes_per_gpu,
        "memory_bytes": s.memory.total,
        "memory_gib": s.memory.table(),
        "fits": found.fits,
        "planning_s": s.planning_s,
    }


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    return {
        "pays": verdict.pays,
        "speed_up": verdict.speed_up,
        "ours": _brief(verdict.ours),
        "other": _brief(verdict.other),
        "because": verdict.because,
        "attention": verdict.attention,
        "busiest": verdict.busiest,
        "needed_bytes_per_s": verdict.needed_bytes_per_s,
    }


def _brief(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {
        "policy": summary.way.name,
        "sizes": summary.way.sizes,
        "idle": summary.idle,
        "exposed": summary.exposed,
    }
