"""``distca plan``: plans the attention of one batch and shows imbalance, bytes and loads."""

import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import (
    OUTPUT,
    argument,
    check_output,
    console,
    json_switch,
    option,
    showing_progress,
)
from distca.data.length_names import FORMS
from distca.planning.costs.profile import DEFAULT_COST
from distca.planning.costs.published import SCALED
from distca.planning.policies import POLICIES
from distca.report.plans import compare_table, heading, plan_table
from distca.runtime.disk import writing

if TYPE_CHECKING:
    from distca.planning.options import PlanOptions
    from distca.planning.placement import Placement
    from distca.planning.plan import Plan
    from distca.planning.policies import Policy

DEFAULT_MODEL = "llama3-8b"
_batch, _plan, _ranks, _output = (
    partial(option, panel=panel) for panel in ("Batch", "Plan", "Ranks", OUTPUT)
)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plans the core attention of one batch over all ranks.

    Shows imbalance and bytes before and after, and the load of each rank.

    For example: distca plan prolong --ranks 64 --compare
    """

    lengths: str = argument(
        "LENGTHS",
        'A JSON file {"ranks": \\[\\[length, ...], ...]}; or documents: a .json list,'
        " .jsonl, .txt, .npy, Megatron .bin/.idx, a folder or a glob; or a distribution:"
        f" {FORMS}. Documents and distributions need --ranks.",
    )
    ranks: int | None = _batch("N", "Number of workers to pack the documents on.")
    context: str | None = _batch(
        "TOKENS",
        "Tokens per rank, such as 64K or 1M. Default: 128K for a distribution, all tokens for"
        " a file.",
    )
    seed: int = _batch("N", "Random seed of a distribution.", 0)
    end_of_document: int | None = _batch("ID", "Token id that ends each document in a .npy file.")
    mask: str = _batch("MASK", "causal, full, window:N, chunk:N or band:N.", "causal")
    model: str | None = _batch(
        "NAME", f"Name of a model, or a Hugging Face folder. Default: {DEFAULT_MODEL}."
    )
    heads: int | None = _batch("N", "Number of query heads; replaces the name of a model.")
    kv_heads: int | None = _batch(
        "N", "Number of key/value heads. Default: as many as query heads."
    )
    head_dim: int | None = _batch("N", "Size of a head.")
    v_head_dim: int | None = _batch("N", "Size of a head of values. Default: the same.")
    latent_dim: int | None = _batch(
        "N", "Size of the latent that is sent instead of keys and values. Default: none is."
    )
    rope_dim: int | None = _batch("N", "Size of the rotary part of a key, sent with the latent.")

    policy: str = _plan("NAME", f"One of {', '.join(POLICIES)}.", "distca")
    placement: str = _plan(
        "NAME", "given: tokens stay where they are; balanced: they are placed again.", "given"
    )
    compare: bool = _plan("", "Compare all policies in one table.", False, "--compare")
    tolerance: float = _plan("SHARE", "How far the slowest rank may be above the mean.", 0.02)
    cost: str = _plan(
        "NAME",
        f"Cost model: h200, h200-flash, {', '.join(SCALED)} (by published rates), a profile file,"
        " scaled:TFLOPS:GB (a GPU by dense bf16 TFLOP/s and GB/s of memory), analytic or pairs.",
        DEFAULT_COST,
    )
    cp: int | None = _plan(
        "N",
        "Workers that share a sequence in context-parallel policies, at most in dynamic-cp."
        " Default: up to 8.",
    )
    tile: int = _plan("TOKENS", "Documents are cut at multiples of this.", 128)
    min_shard: int = _plan("TOKENS", "Smallest piece of a document.", 128)

    servers: int = _ranks("N", "Dedicated attention servers besides the workers.", 0)
    workers_serve: bool = _ranks(
        "", "Workers compute attention too, besides the servers.", False, "--workers-serve"
    )
    ranks_per_node: int | None = _ranks("N", "Ranks of a node. Default: all.")
    max_tokens: int | None = _ranks(
        "TOKENS", "Most tokens of a worker in policies kk and dynamic-cp. Default: any number."
    )
    memory: str | None = _ranks(
        "BYTES", "Limit of a rank for one layer's q, k, v and o, such as 40GB."
    )

    as_json: bool = json_switch()
    out: Path | None = _output("FILE", "Write the plan to this JSON file.")
    plot: Path | None = _output("FILE", "Draw loads and traffic into this .png, .svg or .pdf file.")

    def run(self) -> None:
        from distca.planning.policies import policy_of

        if self.compare:
            if self.policy != "distca" or self.placement != "given" or self.out or self.plot:
                raise ValueError(
                    "--compare plans with every policy: leave out --policy, --placement, --out and"
                    " --plot"
                )
            _compare(self.documents(), self.options(), self.as_json)
        else:
            for flag, path in (("--out", self.out), ("--plot", self.plot)):
                check_output(flag, path, self.lengths)
            self._plan(self.documents(), policy_of(self.policy, self.placement), self.options())

    def documents(self) -> "Placement":
        from distca.cli.sources import read_placement

        return read_placement(
            self.lengths,
            ranks=self.ranks,
            context=self.context,
            seed=self.seed,
            end_of_document=self.end_of_document,
        )

    def options(self) -> "PlanOptions":
        from distca.cli.model_shapes import named_shape
        from distca.cli.sources import parse_bytes
        from distca.planning.options import PlanOptions

        known = {one.name for one in fields(PlanOptions)}
        options = {name: value for name, value in vars(self).items() if name in known}
        if (self.model, self.heads, self.kv_heads, self.head_dim) == (None,) * 4:
            options["model"] = DEFAULT_MODEL
        if self.model is not None:
            options["model"] = named_shape(self.model, ", or heads, kv_heads and head_dim")
        options["workers_serve"] = self.workers_serve or None
        options["memory_bytes"] = None if self.memory is None else parse_bytes(self.memory)
        return PlanOptions(**options)

    def _plan(self, given: "Placement", policy: "Policy", options: "PlanOptions") -> None:
        from distca.cli.records import record_of, summary_of, traffic_matrix
        from distca.planning.api import place_and_plan
        from distca.planning.costs.choice import cost_model

        made = place_and_plan(given, policy, options)
        summary = summary_of(made)
        record = record_of(made, given, cost_model(options.cost, made.shape), summary)
        if self.out is not None:
            before = {"summary": summary, "load_before": record["load_before"].tolist()}
            with writing(self.out):
                self.out.write_text(json.dumps(made.to_json() | before) + "\n")
        if self.plot is not None:
            from distca.report.plan_plots import draw_plan

            with writing(self.plot):
                draw_plan(record, traffic_matrix(made), self.plot)
        if self.as_json:
            typer.echo(json.dumps(summary))
        else:
            _show(made, record, [path for path in (self.out, self.plot) if path is not None])


def _show(made: "Plan", record: dict[str, Any], written: list[Path]) -> None:
    from distca.report.bars import caption, load_bars

    screen, summary = console(), record["summary"]
    screen.print(heading(summary), style="bold")
    screen.print(f"model {made.shape.name}, cost {made.cost}, policy {made.policy}\n")
    screen.print(plan_table(record))
    screen.print(f"\n{caption(summary['ranks'])}", style="bold")
    screen.print(load_bars(record, screen.width, ascii_only=screen.options.ascii_only))
    if made.shortfall:
        missed = f"The bound of {record['bound']:g} x mean is not met: {made.shortfall}."
        screen.print(f"\n{missed}", style="bold red")
    if written:
        screen.print(f"\nwritten: {', '.join(map(str, written))}", soft_wrap=True)


def _compare(given: "Placement", options: "PlanOptions", as_json: bool) -> None:
    from distca.cli.records import comparison_row, summary_of
    from distca.planning.api import place_and_plan
    from distca.planning.policies import policy_of

    ours, *others = POLICIES
    summaries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    policies = (policy_of(ours), policy_of(ours, "balanced"), *map(policy_of, others))
    with showing_progress("policy", len(policies), quiet=as_json) as update:
        for number, policy in enumerate(policies):
            update(number, policy.name)
            try:
                made = place_and_plan(given, policy, options)
            except ValueError as error:
                if not rows:
                    raise  # distca can plan every valid batch, so the input is wrong
                summaries.append({"policy": policy.name, "error": str(error)})
                rows.append(summaries[-1])
            else:
                summaries.append(summary_of(made))
                rows.append(comparison_row(made, summaries[-1]))
    if as_json:
        typer.echo(json.dumps({"policies": summaries}))
        return
    screen, first = console(), summaries[0]
    screen.print(heading(first), style="bold")
    screen.print(
        f"model {options.shape.name}, cost {first['cost']},"
        f" imbalance {first['imbalance_before']:.2f}x as given\n"
    )
    screen.print(compare_table(rows, screen.width))
