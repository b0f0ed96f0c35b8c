"""The text of ``distca doctor``. The input is its JSON record."""

from collections.abc import Iterator
from typing import Any

from distca.report import units

Sections = dict[str, dict[str, str]]
_LINKS = {
    "inside": "memory of GPU 0",
    "from_host": "host to GPU 0",
    "slowest_pair": "slowest pair of GPUs",
    "fastest_pair": "fastest pair of GPUs",
}
_HOPPER = 9.0


def facts_of(record: dict[str, Any]) -> Sections:
    """Returns names and values by section."""
    sections = {
        "Versions": _versions(record["versions"], record["extras"]),
        "GPUs": {str(number): _gpu(gpu) for number, gpu in enumerate(record["gpus"])},
        "Attention kernels, in the order of choice": _kernels(record["kernels"]),
        "Ranks that share a GPU": _sharing(record["nccl"]) if record["gpus"] else {},
        "Host": _host(record["memory"]),
        "Links, measured": {
            _LINKS[name]: units.bandwidth(rate) for name, rate in record["links"].items()
        },
    }
    return {title: rows for title, rows in sections.items() if rows}


def verdict_of(record: dict[str, Any]) -> str:
    """Returns what distca does on this machine, in a sentence."""
    chosen = next((one["backend"] for one in record["kernels"] if one["refusal"] is None), None)
    if chosen is None:
        return "No attention kernel fits, so nothing can be trained here."
    if not record["gpus"]:
        return (
            "There is no GPU: ranks run on the CPU over gloo, which is exact, and good for trying"
            f" things out. Attention is computed by {chosen}."
        )
    ranks = units.several(len(record["gpus"]), "rank")
    return f"`distca train` starts {ranks} here, and {chosen} computes the attention."


def advice_of(record: dict[str, Any]) -> Iterator[str]:
    """Yields what would make this machine better, a sentence each."""
    found, gpus = record["versions"], record["gpus"]
    if gpus and float(gpus[0]["capability"]) >= _HOPPER and not found["flash-attn-4"]:
        yield (
            "flash-attn-4 is faster on this GPU, most of all for long documents: pip install"
            " 'distca[fa4]'."
        )
    if gpus and not found["triton"]:
        yield "Rows are gathered by slower kernels without Triton: pip install triton."
    for number, gpu in enumerate(gpus):
        if gpu["free_bytes"] < 0.9 * gpu["total_bytes"]:
            used = units.size(gpu["total_bytes"] - gpu["free_bytes"])
            yield f"{used} of GPU {number} are in use already: nvidia-smi lists by what."
    yield "Next: `distca selftest` checks that the ranks of this machine compute the right numbers."


def _versions(found: dict[str, str | None], extras: dict[str, str]) -> dict[str, str]:
    rows = {}
    for name, version in found.items():
        extra = extras.get(name) or name
        install = f"pip install 'distca[{extra}]'" if extras.get(name) else f"pip install {name}"
        rows[name] = version or f"not installed: {install}"
    return rows


def _gpu(gpu: dict[str, Any]) -> str:
    free, total = units.size(gpu["free_bytes"]), units.size(gpu["total_bytes"])
    return f"{gpu['name']}, {gpu['sms']} SMs, sm {gpu['capability']}, {free} of {total} free"


def _kernels(kernels: list[dict[str, Any]]) -> dict[str, str]:
    rows, is_taken = {}, False
    for one in kernels:
        fits = "fits, but one before it does too" if is_taken else "will be used"
        is_taken = is_taken or one["refusal"] is None
        rows[one["backend"]] = fits if one["refusal"] is None else f"no: {one['refusal']}"
    return rows


def _sharing(nccl: dict[str, str | None]) -> dict[str, str]:
    return {
        "NCCL of torch": nccl["nccl"] or "none",
        "to share a GPU": nccl["sharing"] or f"no: {nccl['refusal']}",
        "MPS": nccl["mps"] or "not found: it comes with NVIDIA's driver",
    }


def _host(memory: dict[str, int]) -> dict[str, str]:
    return {
        "cores": units.count(memory["cores"]),
        "memory": units.size(memory["host_bytes"]),
        "free on this disk": units.size(memory["disk_free_bytes"]),
    }
