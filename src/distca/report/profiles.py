"""Tables of profiles. The input is plain records, as ``distca profile --json`` prints them."""

from collections.abc import Sequence

from rich.table import Table

from distca.report import units
from distca.report.tables import Record, new_table


def rates_table(record: Record, direction: str) -> Table:
    """Returns the rates of one direction, a row for each number of queries."""
    rates = record[f"{direction}_tflops"]
    unit, scale = _unit(rates)
    titles = (f"{direction},\n{unit}", *(f"\n{units.tokens(keys)}" for keys in record["keys"]))
    table = new_table(*titles, compact=True)
    table.columns[0].style = "bold"
    for queries, row in zip(record["queries"], rates, strict=True):
        cells = ["" if rate is None else _three_digits(rate * scale) for rate in row]
        table.add_row(units.tokens(queries), *cells)
    return table


def profile_facts(record: Record) -> dict[str, str]:
    """Returns everything that is not in the tables, as names and values."""
    sizes = f"{record['heads']} heads, {record['kv_heads']} kv heads, head size"
    facts = {
        "device": f"{record['device']}, {units.several(record['ranks'], 'rank')}",
        "attention": f"{record['backend']}, {record['dtype']}, {sizes} {record['head_dim']}",
        "versions": ", ".join(f"{name} {one}" for name, one in record["versions"].items()),
    }
    unit, scale = _unit([[record["linear_tflops"]]])
    facts["linear"] = f"{_three_digits(record['linear_tflops'] * scale)} {unit}"
    facts["whole layers"] = f"{record['sustained']:.3f} of the speed of their parts alone"
    facts["copy"] = f"{units.size(record['copy_bytes_per_s'])}/s read and written"
    for one in record["exchange"] or ():
        speed = f"{units.size(one['bytes_per_s'])}/s sent by each rank"
        facts[f"exchange of {units.size(one['bytes'])}"] = speed
    for direction in ("forward", "backward"):
        errors = record[f"{direction}_errors"]
        facts[f"error, {direction}"] = (
            f"median {errors['median']:.1%}, worst {errors['worst']:.1%} of"
            f" {units.several(len(record['held_out']), 'held-out call')}"
        )
    return facts


def _three_digits(value: float) -> str:
    """Formats 1.23, 12.3, 123 and 1234, never 1.23e+03."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _unit(rates: Sequence[Sequence[float | None]]) -> tuple[str, float]:
    """Returns TFLOP/s, or GFLOP/s for slow devices such as CPUs, and its scale."""
    most = max(rate for row in rates for rate in row if rate is not None)
    return ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)
