"""distca doctor: on this machine, and its words for machines with GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import distca
from distca.cli import main
from distca.report.machine import advice_of, facts_of, verdict_of

H200 = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "sms": 132,
    "free_bytes": 140 * 10**9,
    "total_bytes": 141 * 10**9,
}


def record(**changes: Any) -> dict[str, Any]:
    return {
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "flash-attn-4": None},
        "extras": {"flash-attn-4": "fa4", "triton": ""},
        "gpus": [H200, H200],
        "kernels": [
            {"backend": "fa4", "refusal": "it is not installed."},
            {"backend": "flash", "refusal": None},
            {"backend": "sdpa", "refusal": None},
        ],
        "nccl": {"nccl": "2.28.9", "sharing": None, "refusal": "too old", "mps": None},
        "memory": {"cores": 16, "host_bytes": 10**11, "disk_free_bytes": 10**10},
        "links": {"inside": 4e12, "from_host": 5e10, "slowest_pair": 3e11, "fastest_pair": 4e11},
    } | changes


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["distca"] == distca.__version__
    assert found["gpus"] == []
    assert found["links"] == {}
    refusals = {one["backend"]: one["refusal"] for one in found["kernels"]}
    assert refusals["sdpa"] is None
    assert "CUDA device" in refusals["flash"]
    with pytest.raises(SystemExit):
        main(["doctor"])
    text = capsys.readouterr().out
    assert "There is no GPU" in text
    assert "share a GPU" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_two_gpus() -> None:
    facts = facts_of(record())
    assert facts["GPUs"]["1"] == "NVIDIA H200, 132 SMs, sm 9.0, 140 GB of 141 GB free"
    assert facts["Versions"]["flash-attn-4"] == "not installed: pip install 'distca[fa4]'"
    assert list(facts["Attention kernels, in the order of choice"].values()) == [
        "no: it is not installed.",
        "will be used",
        "fits, but one before it does too",
    ]
    assert facts["Ranks that share a GPU"]["to share a GPU"] == "no: too old"
    assert facts["Links, measured"]["slowest pair of GPUs"] == "300 GB/s (2.40 Tb/s)"
    assert verdict_of(record()) == (
        "`distca train` starts 2 ranks here, and flash computes the attention."
    )
    advice = " ".join(advice_of(record()))
    assert "distca[fa4]" in advice
    assert "Triton" not in advice
    assert "in use" not in advice


def test_what_is_wrong_is_said() -> None:
    busy = H200 | {"free_bytes": 40 * 10**9}
    versions = {"torch": "2.11.0", "triton": None, "flash-attn-4": "4.0"}
    advice = " ".join(advice_of(record(gpus=[busy], versions=versions)))
    assert "101 GB of GPU 0 are in use already" in advice
    assert "pip install triton" in advice
    assert "fa4" not in advice
    nothing = [{"backend": "sdpa", "refusal": "no."}]
    assert verdict_of(record(kernels=nothing)).startswith("No attention kernel fits")
