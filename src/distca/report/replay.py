"""Tables of replays, from the records of ``distca bench replay --json``."""

from rich.console import Group

from distca.report import units
from distca.report.tables import Columns, Record, fitting_table, meanings

COLUMNS: Columns = {
    "\nrank": lambda row: f"{row['rank']}{'*' if row['calibrates'] else ' '}",
    "step\nmeasured": lambda row: _ms(row["measured"]["step"]),
    "\nsimulated": lambda row: _ms(row["simulated"]["step"]),
    "over\nmeasured": lambda row: _over(row, "simulated"),
    "\nfitted": lambda row: _over(row, "calibrated"),
    "exposed\nmeasured": lambda row: _ms(row["measured"]["exposed"]),
    "\nsimulated ": lambda row: _ms(row["calibrated"]["exposed"]),
    "attention\nplanned": lambda row: _ms(row["simulated"]["attention"]),
    "\nmeasured": lambda row: _ms(row["measured"]["attention"]),
    "MB\nsent": lambda row: f"{row['sent_bytes'] / 1e6:.1f}",
    "\nreceived": lambda row: f"{row['received_bytes'] / 1e6:.1f}",
    "\ntokens": lambda row: units.count(row["tokens"]),
    "\nchosen for": lambda row: row["why"],
}
_MEANINGS = {  # by column
    "step\nmeasured": "ms of all layers, forward and backward",
    "\nfitted": "fitted: simulated with the factors that were fitted to the ranks with *, over"
    " measured",
    "MB\nsent": "MB of one layer",
}
CAPTION = "; ".join(_MEANINGS.values())  # of all columns


def heading(record: Record) -> str:
    words = [
        f"{units.several(record['ranks'], 'rank')} of tp {record['tp']}",
        f"{units.tokens(record['tokens'])} tokens each",
        f"{record['lengths']} up to {units.tokens(record['context'])}",
        f"{record['placement']} placement",
        "ping-pong" if record["ping_pong"] else "no ping-pong",
    ]
    return ", ".join(words)


def replay_table(record: Record, width: int) -> Group:
    """Returns a row for each rank with the columns that fit ``width``, and what they mean."""
    table, lines = fitting_table(COLUMNS, record["rows"], width)
    for row, cells in zip(record["rows"], lines, strict=True):
        table.add_row(*cells, style="dim" if row["calibrates"] else None)
    return Group(table, meanings(table, _MEANINGS))


def replay_facts(record: Record) -> dict[str, str]:
    link = f"{units.size(record['bytes_per_s'])}/s and {record['latency_s'] * 1e6:g} us"
    factors, raw, fitted = (record[name] for name in ("factors", "raw", "calibrated"))
    validated = sum(not row["calibrates"] for row in record["rows"])
    return {
        "device": f"{record['device']}, {record['backend']}, torch {record['torch']}",
        "layers": f"{record['layers']} of {record['model']}, a link of {link}",
        "plan": f"attention {units.ratio(record['imbalance_before'])} before,"
        f" {record['imbalance']:.3f}x after; cost {record['cost']},"
        f" {units.seconds(record['plan_s'])}",
        "step": f"{units.seconds(record['step_s'])}, of which"
        f" {units.seconds(record['exposed_s'])} exposed",
        "worst / mean": f"{record['worst_over_mean']:.3f} measured,"
        f" {record['simulated_worst_over_mean']:.3f} simulated of all ranks",
        "factors": f"linear {factors['linear']:.3f}, attention {factors['attention']:.3f}, from"
        f" {units.several(len(record['rows']) - validated, 'rank')}",
        "error": f"mean {fitted['mean']:.1%}, worst {fitted['worst']:.1%} of"
        f" {units.several(validated, 'other rank')};"
        f" without the factors {raw['mean']:.1%}, {raw['worst']:.1%}",
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _over(row: Record, what: str) -> str:
    return f"{row[what]['step'] / row['measured']['step']:.3f}"
