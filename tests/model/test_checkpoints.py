"""Against ``transformers``, on tiny models with random weights."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from model import bodies
from model.plain import attention, positions_of, tiny
from ranks import RankPool
from safetensors.torch import load_file, save_file
from torch import Tensor

from distca.model.checkpoints import hf_name, load, read_config, save
from distca.model.config import ModelConfig, RopeScaling
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Llama, on_meta, plainly

LENGTHS = (11, 4, 19)
STRETCHED = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
CONFIGS = {
    "llama": tiny(rope_theta=100.0, rope_scaling=STRETCHED),
    "llama, tied": tiny(tied=True, rope_scaling=RopeScaling("linear", 2.0)),
    "qwen3": tiny(qk_norm=True, norm_eps=1e-6),
    "qwen3, tied, windows": tiny(qk_norm=True, tied=True, window=5, window_pattern=2),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@torch.no_grad()
def shaken(model: torch.nn.Module) -> None:
    """Weights large enough that every one of them shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        around = 1.0 if parameter.ndim == 1 else 0.0
        parameter.normal_(around, 0.3, generator=generator)


def ours(config: ModelConfig) -> Llama:
    model = Llama(config)
    shaken(model)
    return model


@torch.no_grad()
def logits(model: Llama, tokens: Tensor) -> Tensor:
    """In float64: what rounding does to float32 depends on the processor."""
    half = Arriving(tokens, positions_of(LENGTHS))
    model = deepcopy(model).double()
    (leaving,) = model([half], plainly(attention(LENGTHS, model.config.mask_of)))
    return leaving.x


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Each document alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert model.dtype == torch.float32
    model = model.double()
    return torch.cat([model(document[None]).logits[0] for document in tokens.split(LENGTHS)])


def some_tokens() -> Tensor:
    return torch.randint(37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def assert_equal(got: Llama, want: Llama) -> None:
    found = dict(got.named_parameters())
    assert found.keys() == dict(want.named_parameters()).keys()
    for name, parameter in want.named_parameters():
        assert torch.equal(found[name], parameter), name


@each_config
def test_what_transformers_wrote(tmp_path: Path, config: ModelConfig) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from distca.model.hf_config import to_hf

    raw = to_hf(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32)
    shaken(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read_config(tmp_path) == config
    model = on_meta(config)
    load(model, tmp_path)
    tokens = some_tokens()
    torch.testing.assert_close(
        logits(model, tokens), their_logits(tmp_path, tokens), rtol=1e-5, atol=1e-5
    )


@each_config
@pytest.mark.parametrize("max_file_bytes", [10**9, 9000, 1], ids=["one", "few", "each"])
def test_what_we_wrote(tmp_path: Path, config: ModelConfig, max_file_bytes: int) -> None:
    model, tokens = ours(config), some_tokens()
    save(model, tmp_path, max_file_bytes=max_file_bytes, extra={"eos_token_id": 36})
    parameters = len(list(model.parameters()))
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files == {10**9: 1, 1: parameters}.get(max_file_bytes, files)
    assert 1 < files < parameters or max_file_bytes != 9000
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 36
    again = on_meta(read_config(tmp_path))
    load(again, tmp_path)
    assert_equal(again, model)
    torch.testing.assert_close(
        their_logits(tmp_path, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5
    )


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    for seed, max_file_bytes in enumerate((9000, 10**9, 20000)):
        model, again = Llama(config), on_meta(config)
        initialize(model, seed)
        save(model, tmp_path, max_file_bytes=max_file_bytes)
        load(again, tmp_path)
        assert_equal(again, model)
    files = {path.name.partition("-of-")[2] for path in tmp_path.glob("*.safetensors")}
    assert len(files) == 1


def test_another_dtype(tmp_path: Path) -> None:
    model = ours(CONFIGS["llama"])
    save(model, tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    again = on_meta(model.config)
    load(again, tmp_path)  # into float32, as the model is
    for (name, got), want in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want.bfloat16().float()), name


def test_stages_load_their_part(tmp_path: Path) -> None:
    model = ours(CONFIGS["qwen3"])
    save(model, tmp_path, max_file_bytes=9000)
    whole = dict(model.named_parameters())
    for start, stop in ((0, 2), (2, 3)):
        stage = on_meta(model.config, start, stop)
        load(stage, tmp_path)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name
    with pytest.raises(ValueError, match=r"layers \[2, 3\) of 3: only a whole model"):
        save(stage, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3, tied, windows"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2 x tp 2"])
def test_sharded_models(tmp_path: Path, pool: RankPool, name: str, shape: tuple[int, ...]) -> None:
    """Loaded from meta into shards, and written from shards: the same files come out."""
    config = CONFIGS[name]
    save(ours(config), tmp_path / "a", max_file_bytes=9000)
    ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
    pool.run(bodies.copied, config, shape, tmp_path / "a", tmp_path / "b", ranks=ranks)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_names() -> None:
    assert hf_name("seams.0.embed.weight") == "model.embed_tokens.weight"
    assert hf_name("seams.3.before.qkv.wk.weight") == "model.layers.3.self_attn.k_proj.weight"
    assert hf_name("seams.3.after.ffn.w2.weight") == "model.layers.2.mlp.down_proj.weight"
    assert hf_name("seams.9.head.output.weight") == "lm_head.weight"


def rewritten(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("lm_head.weight"), "the checkpoint lacks lm_head.weight: it belongs to"),
        (lambda t: t.update(odd=torch.ones(1)), "the checkpoint has unexpected odd: it belongs to"),
        (
            lambda t: t.update(odd=t.pop("model.norm.weight")),
            "lacks model.norm.weight and has unexpected odd",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \(3,\) in model.safetensors but \(24,\)",
        ),
        (lambda t: [t.pop(n) for n in sorted(t)[:20]], "and 8 more: it belongs to another model"),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    save(ours(CONFIGS["llama"]), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=sentence):
        load(on_meta(CONFIGS["llama"]), tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save(ours(CONFIGS["llama"]), tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(60)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged \(.*\): download it again"):
        load(on_meta(CONFIGS["llama"]), tmp_path)


def test_files_cut_or_changed_anywhere_are_loaded_or_refused(tmp_path: Path) -> None:
    save(ours(CONFIGS["llama"]), tmp_path)
    path, draw = tmp_path / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[:size] for size in (0, 1, 7, 8, 9, header - 1, header, len(whole) - 1)]
    for _ in range(150):
        changed = bytearray(whole)
        changed[draw.randrange(header)] ^= 1 << draw.randrange(8)
        damaged.append(bytes(changed))
    words = []
    for content in damaged:
        path.write_bytes(content)
        try:
            load(on_meta(CONFIGS["llama"]), tmp_path)
        except ValueError as error:
            words.append(str(error))
    assert len(words) > 100
    assert all(len(said.splitlines()) == 1 for said in words)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"x"', "[" * 100_000, "\udcff"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_files_that_are_no_table_are_refused(tmp_path: Path, file: str, content: str) -> None:
    save(ours(CONFIGS["llama"]), tmp_path, max_file_bytes=9000)
    (tmp_path / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"cannot be read as JSON|holds .*, not a|no weight_map"):
        load(on_meta(CONFIGS["llama"]), tmp_path)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({NORM: "gone.safetensors"}, "names gone.safetensors, but the folder has no such file"),
        ({NORM: "../other.safetensors"}, "no weight_map from tensors to files of its folder"),
        ({NORM: 3}, "no weight_map from tensors to files of its folder"),
        ({NORM: "model-00001-of-{last}.safetensors"}, f"lacks {NORM}, which the index places"),
    ],
)
def test_an_index_that_does_not_fit_its_files(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    save(ours(CONFIGS["llama"]), tmp_path, max_file_bytes=9000)
    path = tmp_path / "model.safetensors.index.json"
    last = (
        max(tmp_path.glob("*.safetensors")).name.rpartition("-of-")[2].removesuffix(".safetensors")
    )
    index = json.loads(path.read_text())
    index["weight_map"] |= {
        name: file.format(last=last) if isinstance(file, str) else file
        for name, file in change.items()
    }
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=sentence):
        load(on_meta(CONFIGS["llama"]), tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save(ours(CONFIGS["llama"]), tmp_path)
    rewritten(tmp_path, lambda t: t.update({NORM: t[NORM].to(dtype)}))
    with pytest.raises(ValueError, match=f"{NORM} is of type .*: quantized weights are not"):
        load(on_meta(CONFIGS["llama"]), tmp_path)


def test_what_older_files_hold_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    model = ours(CONFIGS["llama, tied"])
    save(model, tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    extra["lm_head.weight"] = model.seam_list[0].embed.weight.detach().clone()
    rewritten(tmp_path, lambda tensors: tensors.update(extra))
    again = on_meta(model.config)
    load(again, tmp_path)
    assert_equal(again, model)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    model = Llama(CONFIGS["llama"])
    initialize(model, 0)
    with pytest.raises(ValueError, match=r"config.json does not exist: give a folder"):
        load(model, tmp_path)
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"has layers 3 not 2, ffn 20 not 16: keep what its"):
        load(Llama(tiny(layers=2, ffn=16, rope_theta=100.0, rope_scaling=STRETCHED)), tmp_path)
