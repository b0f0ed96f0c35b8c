"""The settings of ``distca simulate``: each is an option, and a key of a TOML file.

A file is flat, or has a section for each group of options; ``name`` in [model] is ``model``, and in
[cluster] it is ``cluster``. Options go over the file, and the file over the defaults.
"""

import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

SECTIONS = {
    "model": "The model",
    "cluster": "The cluster",
    "data": "The data",
    "ways": "Ways to train",
}

TEXTS = tuple[str, ...]


def _in(section: str, metavar: str, said: str) -> Any:
    return Option(metavar=metavar, help=said, rich_help_panel=SECTIONS[section])


_model, _cluster, _data, _ways = (partial(_in, section) for section in SECTIONS)


@dataclass(frozen=True)
class Settings:
    """Text as people write it; ``cli.scenarios`` makes numbers of it. Empty: see the help."""

    model: Annotated[str, _model("NAME", "A model's name; llama3-8b by default.")] = "llama3-8b"
    layers: Annotated[int | None, _model("N", "Instead of the model's own, as the next.")] = None
    hidden: Annotated[int | None, _model("N", "Width of a token.")] = None
    ffn: Annotated[int | None, _model("N", "Width of the feed-forward.")] = None
    heads: Annotated[int | None, _model("N", "Query heads.")] = None
    kv_heads: Annotated[int | None, _model("N", "Key/value heads.")] = None
    head_dim: Annotated[int | None, _model("N", "Size of a head.")] = None
    vocab_size: Annotated[int | None, _model("N", "Tokens that there are.")] = None

    cluster: Annotated[
        str, _cluster("NAME", "h200 (the default), h200-flash or h200-ethernet; then numbers.")
    ] = "h200"
    gpus: Annotated[
        str, _cluster("N,...", "64 by default. Several, as 64,128,256, show how it scales.")
    ] = ""
    gpus_per_node: Annotated[int | None, _cluster("N", "8 in the clusters above.")] = None
    memory: Annotated[
        str, _cluster("BYTES", "Of a GPU, such as 80GB; ways may use 95 % of it.")
    ] = ""
    inside: Annotated[str, _cluster("BYTES", "Per second and GPU in a node: 360GB.")] = ""
    across: Annotated[str, _cluster("BYTES", "Per second and GPU between nodes: 50GB.")] = ""
    latency: Annotated[
        float | None, _cluster("MICROSECONDS", "Of every exchange between nodes.")
    ] = None
    profile: Annotated[
        str, _cluster("NAME", "Speed of kernels: h200, h200-flash or a profile file.")
    ] = ""
    jitter: Annotated[
        float, _cluster("SHARE", "Standard deviation of a kernel's time, such as 0.05.")
    ] = 0.0
    link_jitter: Annotated[float, _cluster("SHARE", "The same of an exchange.")] = 0.0
    slow: Annotated[
        tuple[str, ...], _cluster("GPU=SPEED", "A GPU of another speed, such as 3=0.5; repeat.")
    ] = ()
    unknown_speeds: Annotated[bool, _cluster("", "The planner is not told of them.")] = False

    lengths: Annotated[
        str,
        _data(
            "LENGTHS",
            "pretrain (the default), prolong, lognormal:MEDIAN:SIGMA, fixed:N, or documents as"
            " distca plan reads them.",
        ),
    ] = "pretrain"
    context: Annotated[
        str, _data("TOKENS", "Of a sequence, and of the longest document; 128K by default.")
    ] = "128K"
    sequences: Annotated[
        int | None, _data("N", "In a step, on the first number of GPUs; 32K tokens a GPU.")
    ] = None
    batches: Annotated[int, _data("N", "To take the mean of; 5 by default.")] = 5
    seed: Annotated[int, _data("N", "Of a distribution.")] = 0
    end_of_document: Annotated[
        int | None, _data("ID", "The token id that ends a document in a .npy.")
    ] = None
    mask: Annotated[str, _data("MASK", "causal (the default), full or window:N.")] = "causal"

    policy: Annotated[
        tuple[str, ...],
        _ways(
            "NAME",
            "colocated, head-tail-cp, per-document-cp, wlb, greedy or distca; repeat. By default"
            " colocated, head-tail-cp, wlb and distca.",
        ),
    ] = ()
    placement: Annotated[str, _ways("NAME", "given or balanced, of distca; both by default.")] = ""
    sweep: Annotated[
        bool, _ways("", "Try all sizes, not only those of cp: the best that fits.")
    ] = False
    tp: Annotated[str, _ways("N,...", "GPUs that share heads; the most up to 8.")] = ""
    pp: Annotated[str, _ways("N,...", "Pipeline stages; 1 by default.")] = ""
    dp: Annotated[str, _ways("N,...", "Groups with sequences of their own.")] = ""
    cp: Annotated[str, _ways("N,...", "Workers that share a sequence; all sizes.")] = ""
    micro_batches: Annotated[str, _ways("N,...", "Of a step; all that apply.")] = ""
    servers: Annotated[str, _ways("N,...", "GPUs that only serve, of distca; none.")] = ""
    ping_pong: Annotated[bool, _ways("", "Two halves that hide each other's exchanges.")] = True
    tolerance: Annotated[
        float, _ways("SHARE", "The busiest may be so far above the mean; 0.02 by default.")
    ] = 0.02
    recompute: Annotated[bool, _ways("", "Layers again in backward, but for attention.")] = True

    @classmethod
    def read(cls, path: Path | None, given: Mapping[str, Any]) -> "Settings":
        """given: options; those that are None count as left out."""
        values = {} if path is None else _read(path)
        values |= {name: value for name, value in given.items() if value is not None}
        return cls(**values)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each setting, in place of its ``**given``, before its own."""
    signature = inspect.signature(command)
    argument, *own, _ = signature.parameters.values()
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[list[str] | None if kind == TEXTS else kind | None, option],
        )
        for name, (kind, option) in _known().items()
    ]
    whole = signature.replace(parameters=[argument, *options, *own])
    command.__signature__ = whole  # type: ignore[attr-defined]
    return command


def _known() -> dict[str, tuple[Any, Any]]:
    """Type and option of every setting."""
    hints = get_type_hints(Settings, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items()}


def _read(path: Path) -> dict[str, Any]:
    """A file's values by setting."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    values = {}
    for key, value in tree.items():
        section = key if isinstance(value, dict) else ""
        for inner, one in value.items() if section else [(key, value)]:
            name = section if inner == "name" else inner
            where = f"{section}.{inner}" if section else inner
            _check_known(name, section, f"{where} in {path}")
            values[name] = _value(_known()[name][0], one, f"{where} in {path}")
    return values


def _check_known(name: str, section: str, where: str) -> None:
    known = _known()
    if section and section not in SECTIONS:
        raise ValueError(f"{where} is unknown: the sections are {', '.join(SECTIONS)}")
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"{where} is unknown: {hint}")
    home = next(key for key, title in SECTIONS.items() if title == known[name][1].rich_help_panel)
    if section not in ("", home):
        raise ValueError(f"{where} is in the wrong section: write it in [{home}]")


def _value(kind: Any, value: Any, where: str) -> Any:
    """Checked, and text where an option would be text: gpus = 64 or [64, 128], context = 4096."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == TEXTS:
        many = value if isinstance(value, list) else [value]
        return tuple(_value(str, one, where) for one in many)
    if kind is str and isinstance(value, list):
        return ",".join(_value(str, one, where) for one in value)
    if kind is str and (number or isinstance(value, str)):
        return str(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (float, float | None) and number:
        return float(value)
    if kind in (int, int | None) and number and isinstance(value, int):
        return value
    words = {bool: "true or false", str: "text", float: "a number", float | None: "a number"}
    raise ValueError(f"{where} is {value!r}: it must be {words.get(kind, 'a whole number')}")
