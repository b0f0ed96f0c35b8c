"""A checkpoint of a run, exported and evaluated, against transformers and the run itself."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import World
from safetensors import SafetensorError
from train.runs import fit

from distca.cli import main
from distca.data.documents import Document
from distca.data.loader import in_batches
from distca.data.tokenizers import open_tokenizer
from distca.train.evaluate import NAMES, LengthLosses, _means
from distca.train.step_folders import COMPLETE
from distca.train.trained import TrainedRun, _first

STEPS = 3
SETTINGS = (
    "model.sizes={layers=2,hidden=64,heads=2,kv_heads=1,head_dim=32,ffn=64}",
    f"train.steps={STEPS}", "train.lr=0.01", "train.warmup=1", "train.checkpoint_every=2",
    f"train.eval_every={STEPS}", "train.eval_tokens=1000000", "train.tokens_per_step=2048",
    "data.context=1024", "data.held_out=2",
)  # fmt: skip
TEXTS = ("A short document.", "A longer one, with ünïcödé and bytes: \x00\x7f😀. " * 12)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 2 and 3."""
    out = tmp_path_factory.mktemp("run")
    world(1).run(fit, [*SETTINGS, f"out={out}"], ranks=1)
    return out


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    TrainedRun.open(run).export(out)
    return out


def reference(folder: Path) -> tuple[float, int]:
    """The sum of the losses of TEXTS in transformers, document by document, and the targets."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for text in TEXTS:
        tokens = torch.from_numpy(open_tokenizer().document(text).tokens)[None]
        with torch.no_grad():
            mean = model(tokens, labels=tokens).loss
        total, count = total + float(mean) * (tokens.numel() - 1), count + tokens.numel() - 1
    return total, count


@pytest.fixture
def evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``distca eval`` prints."""

    def call(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(run), *options])
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.out

    return call


def test_the_exported_model_has_the_same_loss_in_transformers(
    evaluated: Callable[..., str], exported: Path, texts: Path
) -> None:
    found: dict[str, Any] = json.loads(evaluated(f"--data={texts}", "--json"))
    total, count = reference(exported)
    assert found["targets"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert [one["targets"] for one in found["by_length"].values()] == [
        len(text.encode()) for text in TEXTS
    ]


def test_held_out_documents_have_the_loss_of_the_run(
    run: Path, evaluated: Callable[..., str]
) -> None:
    *_, last = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    printed = evaluated()
    assert f"step {STEPS} of {run} on held-out documents" in printed
    assert f"{last['eval_loss']:.4f}" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_tokens", "shares"), [(None, [0.25, 0.5, 1.0]), (40, [0.5, 1.0]), (1000, [0.25, 0.5, 1.0])]
)
def test_the_share_that_is_evaluated_is_that_of_documents_or_of_tokens(
    num_tokens: int | None, shares: list[float]
) -> None:
    lengths = [30, 10, 10, 10]  # of documents; the first has two pieces
    documents = [Document.from_tokens(np.zeros(length)) for length in lengths]
    shown: list[float] = []
    batches = in_batches(documents, 20, 20)
    for _ in _first(batches, len(documents), num_tokens, lambda share, _: shown.append(share)):
        pass
    assert shown == shares


def test_an_export_shows_the_share_of_its_bytes(run: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    TrainedRun.open(run).export(tmp_path / "out", torch.bfloat16, shares.append)
    assert len(shares) > 10  # files that are checked, tensors that are read, a file that is written
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0


def test_without_a_target_there_is_no_loss() -> None:
    none, one = np.zeros(len(NAMES)), np.eye(len(NAMES))[0]
    assert _means(LengthLosses(none, none)) == {}
    assert _means(LengthLosses(3 * one, one)) == {"eval_loss": 3.0, "eval_loss_below_256": 3.0}


def test_an_export_onto_a_full_disk_names_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=9, free=1))
        with pytest.raises(ValueError, match=rf"left on {out}: the model needs about \S+ GB and"):
            TrainedRun.open(run).export(out)
    assert not out.exists()

    def save_file(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    with pytest.raises(ValueError, match=rf"^no space left on {out}: "):
        TrainedRun.open(run).export(out)


def test_the_exported_tokenizer_is_that_of_the_run(exported: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    theirs, ours = AutoTokenizer.from_pretrained(exported), open_tokenizer()
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)
    assert GenerationConfig.from_pretrained(exported).eos_token_id == ours.eos


def test_a_tokenizer_of_hugging_face_is_copied_with_the_chosen_tokens(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"tokenizer": str(exported), "eos": "<|pad|>"}
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    (other / "checkpoints").symlink_to(run / "checkpoints")
    result = TrainedRun.open(other, 2).export(tmp_path / "out", torch.bfloat16)
    assert (result["step"], result["tokenizer"]) == (2, True)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"]) == ("<|bos|>", "<|pad|>")
    model = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (model["eos_token_id"], model["torch_dtype"]) == (258, "bfloat16")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        exported / "tokenizer.json"
    ).read_bytes()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_mistakes_are_one_sentence(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"--out={tmp_path / 'new'}"
    assert "not an empty folder" in refused(capsys, "export", str(run), f"--out={exported}")
    assert "needs --out DIR" in refused(capsys, "export", str(run))
    assert "choose one of float32" in refused(capsys, "export", str(run), new, "--dtype=int8")
    assert "choose one of [2, 3]" in refused(capsys, "export", str(run), new, "--step=7")
    assert "choose one of [2, 3]" in refused(capsys, "eval", str(run), "--step=7")
    assert "has no config.json" in refused(capsys, "export", str(tmp_path), new)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert "no complete checkpoint" in refused(capsys, "export", str(tmp_path), new)
    assert "no complete checkpoint" in refused(capsys, "eval", str(tmp_path))
    (tmp_path / "config.json").write_text('{"train": {"stepz": 1}}')
    assert "did you mean steps?" in refused(capsys, "eval", str(tmp_path))
    assert not (tmp_path / "new").exists()


def test_the_config_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["sizes"]["rope_theta"] = 77.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(
        ValueError, match=r"rope_theta is 10000\.0 there and 77\.0 here: use the mod"
    ):
        TrainedRun.open(tmp_path).export(tmp_path / "out")


def test_a_damaged_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    damaged = TrainedRun.open(tmp_path / "run")
    with (damaged.checkpoint / COMPLETE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"is damaged .*: load an earlier checkpoint"):
        damaged.export(tmp_path / "out")
