"""The files for Slurm and Kubernetes start a run, here on one node with two CPU ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN = """out = "{out}"
[model]
sizes = {{ layers = 1, hidden = 64, ffn = 64, heads = 2, kv_heads = 1, head_dim = 32 }}
[data]
context = 256
[train]
steps = 2
tokens_per_step = 512
save_at_end = false
[parallel]
ping_pong = false
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which distca, torchrun and the programs of Slurm are found."""
    programs = {
        "distca": f'exec {sys.executable} -m distca "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "scontrol": "echo localhost; seq 99999",  # show hostnames LIST, more than a pipe holds
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(out=tmp_path / "run"))
    return path


def train(command: list[str], environment: dict[str, str], config: Path) -> None:
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    assert len(json.loads(lines[0])["ranks"]["attention_s"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm(environment: dict[str, str], config: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "a[0-1]", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid())}
    job["SLURM_GPUS_ON_NODE"] = "2"
    train(["bash", str(EXAMPLES / "train.sbatch"), str(config)], environment | job, config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kubernetes(environment: dict[str, str], config: Path) -> None:
    container = containers()[0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert set(variables) == {"NODES", "GPUS_PER_NODE", "HEAD", "CONFIG"}
    variables |= {"NODES": "1", "GPUS_PER_NODE": "2", "HEAD": "localhost", "CONFIG": str(config)}
    variables["JOB_COMPLETION_INDEX"] = "0"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = container["args"][0].replace("29500", str(port))
    assert command != container["args"][0]
    train([*container["command"], command], environment | variables, config)


def test_kubernetes_numbers_agree() -> None:
    service, job = documents()
    spec, container = job["spec"], containers()[0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["GPUS_PER_NODE"])
    names = {service["metadata"]["name"], spec["template"]["spec"]["subdomain"]}
    assert names == {variables["HEAD"].split(".")[1]}
    assert variables["HEAD"].startswith(f"{job['metadata']['name']}-0.")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def containers() -> list[dict[str, Any]]:
    return documents()[1]["spec"]["template"]["spec"]["containers"]
