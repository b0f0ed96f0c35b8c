"""``distca plan``: lengths in; imbalance, bytes, a table and a picture out."""

# What plans is imported inside the functions: `distca --help` must not wait for numpy.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from distca.planning.costs.profile import DEFAULT_COST

if TYPE_CHECKING:
    from rich.console import Console

    from distca.planning.options import PlanOptions
    from distca.planning.placement import Placement
    from distca.planning.plan import Plan
    from distca.planning.policies import Policy

_BATCH, _PLAN, _RANKS, _SHOW = "The batch", "The plan", "The ranks", "What to show"
DEFAULT_MODEL = "llama3-8b"


def plan(
    lengths: Annotated[
        str,
        Argument(
            metavar="LENGTHS",
            help='A JSON file {"ranks": \\[\\[length, ...], ...]}; or documents: a .json list,'
            " .jsonl, .txt, .npy, Megatron .bin/.idx, a folder or a glob; or a distribution:"
            " pretrain, prolong, lognormal:MEDIAN:SIGMA, fixed:N. The latter two need --ranks.",
        ),
    ],
    ranks: Annotated[
        int | None,
        Option(
            metavar="N", help="Workers to pack documents over, in order.", rich_help_panel=_BATCH
        ),
    ] = None,
    context: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help="Tokens per rank, such as 64K or 1M; by default 128K of a distribution, and all"
            " of a file.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    seed: Annotated[
        int, Option(metavar="N", help="Of a distribution.", rich_help_panel=_BATCH)
    ] = 0,
    end_of_document: Annotated[
        int | None,
        Option(
            metavar="ID",
            help="The token id that ends a document in a .npy.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    mask: Annotated[
        str, Option(metavar="MASK", help="causal, full or window:N.", rich_help_panel=_BATCH)
    ] = "causal",
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"A model's name; {DEFAULT_MODEL} by default.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    heads: Annotated[
        int | None,
        Option(metavar="N", help="Query heads, instead of a model.", rich_help_panel=_BATCH),
    ] = None,
    kv_heads: Annotated[
        int | None,
        Option(metavar="N", help="Key/value heads; as many as heads.", rich_help_panel=_BATCH),
    ] = None,
    head_dim: Annotated[
        int | None, Option(metavar="N", help="Size of a head.", rich_help_panel=_BATCH)
    ] = None,
    policy: Annotated[
        str,
        Option(
            metavar="NAME",
            help="distca, colocated, head-tail-cp, per-document-cp, wlb or greedy.",
            rich_help_panel=_PLAN,
        ),
    ] = "distca",
    placement: Annotated[
        str,
        Option(
            metavar="NAME",
            help="given leaves tokens where they are; balanced places them anew.",
            rich_help_panel=_PLAN,
        ),
    ] = "given",
    compare: Annotated[
        bool, Option("--compare", help="All policies side by side.", rich_help_panel=_PLAN)
    ] = False,
    tolerance: Annotated[
        float,
        Option(
            metavar="SHARE",
            help="The worst rank may be this far above the mean.",
            rich_help_panel=_PLAN,
        ),
    ] = 0.02,
    cost: Annotated[
        str,
        Option(
            metavar="NAME",
            help="h200, h200-flash or a profile file; analytic or pairs.",
            rich_help_panel=_PLAN,
        ),
    ] = DEFAULT_COST,
    cp: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Workers that share a sequence in the cp policies.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    tile: Annotated[
        int,
        Option(
            metavar="TOKENS", help="Cuts are multiples of so many tokens.", rich_help_panel=_PLAN
        ),
    ] = 128,
    min_shard: Annotated[
        int,
        Option(
            metavar="TOKENS", help="Tokens that a cut piece has at least.", rich_help_panel=_PLAN
        ),
    ] = 128,
    servers: Annotated[
        int,
        Option(metavar="N", help="Dedicated servers beyond the workers.", rich_help_panel=_RANKS),
    ] = 0,
    workers_serve: Annotated[
        bool,
        Option("--workers-serve", help="Workers serve beside them.", rich_help_panel=_RANKS),
    ] = False,
    ranks_per_node: Annotated[
        int | None, Option(metavar="N", help="One node by default.", rich_help_panel=_RANKS)
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            metavar="BYTES",
            help="Of a rank for one layer's q, k, v and o, such as 40GB.",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object, for machines.", rich_help_panel=_SHOW)
    ] = False,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the plan to this JSON file.", rich_help_panel=_SHOW),
    ] = None,
    plot: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Draw loads and traffic into this .png, .svg or .pdf.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
) -> None:
    """Plans one batch's core attention over all ranks.

    Shows imbalance and bytes before and after, and the load of each rank. For a first look:
    distca plan prolong --ranks 64 --compare
    """
    from distca.cli.sources import parse_bytes, read_placement
    from distca.planning.options import PlanOptions
    from distca.planning.policies import policy_of

    if compare and (policy != "distca" or placement != "given" or out or plot):
        raise ValueError(
            "--compare plans with every policy: leave out --policy, --placement, --out and --plot"
        )
    if model is None and (heads, kv_heads, head_dim) == (None, None, None):
        model = DEFAULT_MODEL
    given = read_placement(
        lengths, ranks=ranks, context=context, seed=seed, end_of_document=end_of_document
    )
    options: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mask": mask,
        "cost": cost,
        "tolerance": tolerance,
        "servers": servers,
        "workers_serve": workers_serve or None,
        "memory_bytes": None if memory is None else parse_bytes(memory),
        "ranks_per_node": ranks_per_node,
        "cp": cp,
        "tile": tile,
        "min_shard": min_shard,
    }
    if compare:
        _compare(given, PlanOptions(**options), as_json)
    else:
        _plan_one(given, policy_of(policy, placement), PlanOptions(**options), as_json, out, plot)


def _plan_one(
    given: "Placement",
    policy: "Policy",
    options: "PlanOptions",
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    from distca.cli.records import record_of, summary_of, traffic_matrix
    from distca.planning.api import place_and_plan
    from distca.planning.costs.choice import cost_model

    made = place_and_plan(given, policy, options)
    summary = summary_of(made)
    record = record_of(made, given, cost_model(options.cost, made.shape), summary)
    if out is not None:
        out.write_text(json.dumps(made.to_json() | {"summary": summary}) + "\n")
    if plot is not None:
        from distca.report.plots import draw_plan

        draw_plan(record, traffic_matrix(made), plot)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _show(made, record, written=[path for path in (out, plot) if path is not None])


def _show(made: "Plan", record: dict[str, Any], written: list[Path]) -> None:
    from distca.report.bars import caption, load_bars
    from distca.report.tables import heading, plan_table

    console = _console()
    summary = record["summary"]
    console.print(heading(summary), style="bold")
    console.print(f"model {made.shape.name}, cost {made.cost}, policy {made.policy}\n")
    console.print(plan_table(record))
    console.print(f"\n{caption(summary['ranks'])}", style="bold")
    ascii_only = console.options.ascii_only
    console.print(load_bars(record, console.width, ascii_only=ascii_only))
    if made.shortfall:
        said = f"The bound of {record['bound']:g} x mean is not met: {made.shortfall}."
        console.print(f"\n{said}", style="bold red")
    if written:
        console.print(f"\nwritten: {', '.join(map(str, written))}", soft_wrap=True)


def _compare(given: "Placement", options: "PlanOptions", as_json: bool) -> None:
    from distca.cli.records import comparison_row, summary_of
    from distca.planning.api import place_and_plan
    from distca.planning.policies import POLICIES, policy_of
    from distca.report.tables import COMPARE_CAPTION, compare_table, heading

    ours, *others = POLICIES
    policies = [policy_of(ours), policy_of(ours, "balanced"), *map(policy_of, others)]
    summaries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for policy in policies:
        try:
            made = place_and_plan(given, policy, options)
        except ValueError as error:
            if not rows:
                raise  # ours takes every batch, so it is the input that is wrong
            summaries.append({"policy": policy.name, "error": str(error)})
            rows.append(summaries[-1])
        else:
            summaries.append(summary_of(made))
            rows.append(comparison_row(made, summaries[-1]))
    if as_json:
        typer.echo(json.dumps({"policies": summaries}))
        return
    console, first = _console(), summaries[0]
    console.print(heading(first), style="bold")
    console.print(
        f"model {options.shape.name}, cost {first['cost']},"
        f" imbalance {first['imbalance_before']:.2f}x as given\n"
    )
    console.print(compare_table(rows, console.width))
    console.print(f"\n{COMPARE_CAPTION}", style="dim")


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
