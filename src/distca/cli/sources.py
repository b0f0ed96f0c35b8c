"""Parses what users write on the command line: LENGTHS, 128K, 40GB."""

import math
import re
from pathlib import Path
from typing import Any

from distca.data.length_names import FORMS, names_distribution
from distca.data.lengths import Lengths, distribution, take
from distca.data.readers import FILES, LONGEST, read_json, read_lengths
from distca.planning.placement import Placement

DEFAULT_CONTEXT = "128K"
MOST_RANKS = 1 << 16  # far above all clusters
_TOKENS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = re.compile(r"[KMGT]i?b$")  # Gb, which is not GB
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kKMGT]i?)?)(B|b|bit)(?:/s|ps)?")
_BYTES = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("kMGT", 1)
}


def read_placement(
    source: str,
    *,
    ranks: int | None = None,
    context: str | None = None,
    seed: int = 0,
    end_of_document: int | None = None,
) -> Placement:
    """Returns the placement in a JSON file, or packs documents of a file or a distribution."""
    if ranks is not None and not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: it must be from 1 to {MOST_RANKS}")
    if seed < 0:
        raise ValueError(f"--seed {seed}: it must be at least 0")
    if names_distribution(source):
        num_ranks = _needed(ranks, source)
        per_rank = parse_tokens(context or DEFAULT_CONTEXT)
        lengths = distribution(source, per_rank).batch(num_ranks * per_rank, seed)
        return Placement.in_order(lengths, num_ranks)
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        data = read_json(path)
        if isinstance(data, dict) and "ranks" in data:
            if (ranks, context, end_of_document) != (None, None, None):
                raise ValueError(
                    f"{path} lists the documents of each rank:"
                    " leave out --ranks, --context and --end-of-document"
                )
            given = Placement.from_ranks(_check_ranks(data["ranks"], path))
            if not given.tokens.any():
                raise ValueError(f"{path} holds no documents: it needs one or more")
            return given
        if not isinstance(data, list) and not (isinstance(data, dict) and "lengths" in data):
            raise ValueError(
                f'{path} holds no lengths: write {{"ranks": [[length, ...], ...]}},'
                ' {"lengths": [...]} or a list of lengths'
            )
    lengths = read_documents(source, end_of_document)
    num_ranks = _needed(ranks, source)
    if context is not None:
        lengths = take(lengths, num_ranks * parse_tokens(context))
    return Placement.in_order(lengths, num_ranks)


def read_documents(source: str, end_of_document: int | None) -> Lengths:
    """Returns the lengths of documents in files; who names none may have meant a distribution."""
    known = f"{FILES}, a glob, or a distribution: {FORMS}"
    return read_lengths(source, end_of_document=end_of_document, known=known)


def parse_tokens(text: str) -> int:
    """Parses 131072, 128K or 1M, where K is 1,024."""
    number = _parse(text, _TOKENS)
    if number is None or not 1 <= number < LONGEST:
        raise ValueError(f"{text!r} is not a number of tokens: write 131072, 128K or 1M")
    return number


def parse_bytes(text: str) -> int:
    """Parses 40GB (40e9 bytes) or 40GiB (40 x 2^30 bytes)."""
    number = None if _BITS.search(text) else _parse(text, _BYTES)
    if number is None or not 1 <= number < 1 << 62:
        raise ValueError(
            f"{text!r} is not a number of bytes: write 1 or more with their unit, as in 40GB, 512MB"
            " or 40GiB"
        )
    return number


def parse_bandwidth(text: str) -> float:
    """Parses bytes per second: 50GB, 50GB/s, 400Gb, 400Gbit/s and 400Gbps are the same."""
    bytes_per_s = 0.0
    if found := _BANDWIDTH.fullmatch(text.strip()):
        number, prefix, unit = found.groups()
        factor = _BYTES[f"{prefix.replace('K', 'k')}B"]
        bytes_per_s = float(number) * factor / (1 if unit == "B" else 8)
    if not 0 < bytes_per_s < math.inf:
        raise ValueError(
            f"{text!r} is not a bandwidth: write a number above 0 with its unit, in bits, as in"
            " 400Gb, or in bytes, as in 50GB"
        )
    return bytes_per_s


def _parse(text: str, units: dict[str, int]) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    known = {unit.lower(): factor for unit, factor in units.items()}
    if found is None or found[2].lower() not in known:
        return None
    return round(float(found[1]) * known[found[2].lower()])


def _needed(ranks: int | None, source: str) -> int:
    if ranks is None:
        raise ValueError(f"{source} has no ranks: add --ranks N to pack it on N ranks")
    return ranks


def _check_ranks(ranks: Any, path: Path) -> list[list[Any]]:
    """Checks the outer shape and the size of numbers; ``Placement.from_ranks`` checks the rest."""
    if not isinstance(ranks, list) or not all(isinstance(entries, list) for entries in ranks):
        raise ValueError(f'"ranks" in {path} must be a list with one list of documents per rank')
    for rank, entries in enumerate(ranks):
        for entry in entries:
            for number in entry.values() if isinstance(entry, dict) else [entry]:
                if isinstance(number, int) and abs(number) >= LONGEST:
                    raise ValueError(
                        f"{path}: rank {rank} holds {number}: a document has fewer than {LONGEST}"
                        " tokens"
                    )
    return ranks
