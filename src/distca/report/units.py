"""Formats numbers for people: 1.20 GB, 1.02x, 23 ms, 1,048,576."""

_PREFIXES = ("B", "kB", "MB", "GB", "TB", "PB")


def size(num_bytes: float) -> str:
    """Formats bytes with three digits, in decimal units, as links and memories are specified."""
    power = 0
    while num_bytes >= 999.5 and power < len(_PREFIXES) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    digits = 0 if power == 0 or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {_PREFIXES[power]}"


def bandwidth(bytes_per_s: float) -> str:
    """Formats bytes and bits per second: 50.0 GB/s (400 Gb/s)."""
    return f"{size(bytes_per_s)}/s ({size(bytes_per_s * 8).replace('B', 'b')}/s)"


def scale(largest: float) -> tuple[float, str]:
    """Returns the unit of an axis up to ``largest`` bytes, as a divisor and a name."""
    power = 3  # GB, unless that is too coarse or too fine
    while power > 0 and largest < 0.1 * 1000.0**power:
        power -= 1
    while power < len(_PREFIXES) - 1 and largest >= 1000.0 ** (power + 1):
        power += 1
    return 1000.0**power, _PREFIXES[power]


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def count(value: int) -> str:
    return f"{value:,}"


def several(value: int, what: str) -> str:
    """Formats 1 rank, 2 ranks."""
    return f"{count(value)} {what}{'' if value == 1 else 's'}"


def tokens(value: int) -> str:
    """Formats 131072 as 128K."""
    return f"{value >> 10}K" if value >= 1024 and value % 1024 == 0 else str(value)
