"""Loads and saves Hugging Face folders: ``config.json`` and safetensors.

    config.json
    model.safetensors                       or, in parts,
    model-00001-of-00003.safetensors, ...   and model.safetensors.index.json: name -> file

Parameters may be sharded (DTensors) or on the meta device. Besides the model, a load holds one
tensor at a time, and a save holds one file's tensors on rank 0. Weights need no permutation, since
both sides rotate the two halves of a head.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distca.model.config import ModelConfig
from distca.model.hf_config import from_hf, to_hf
from distca.model.initialize import fill, materialize
from distca.model.llama import Llama, on_meta

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OUTPUT = "lm_head.weight"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_ENDS = {
    "embed": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}
_OF_LAYER = {
    "before.norm": "input_layernorm",
    "before.qkv.wq": "self_attn.q_proj",
    "before.qkv.wk": "self_attn.k_proj",
    "before.qkv.wv": "self_attn.v_proj",
    "before.qkv.q_norm": "self_attn.q_norm",
    "before.qkv.k_norm": "self_attn.k_norm",
    "after.wo": "self_attn.o_proj",
    "after.norm": "post_attention_layernorm",
    "after.ffn.w1": "mlp.gate_proj",
    "after.ffn.w2": "mlp.down_proj",
    "after.ffn.w3": "mlp.up_proj",
}


def hf_name(name: str) -> str:
    """seams.3.after.wo.weight -> model.layers.2.self_attn.o_proj.weight"""
    _, seam, inner = name.removesuffix(".weight").split(".", 2)
    if inner in _ENDS:
        return f"{_ENDS[inner]}.weight"
    layer = int(seam) - inner.startswith("after.")
    return f"model.layers.{layer}.{_OF_LAYER[inner]}.weight"


def read_config(folder: Path | str) -> ModelConfig:
    return from_hf(_json(Path(folder) / CONFIG))


def load(model: Llama, folder: Path | str, *, device: torch.device | str | None = None) -> None:
    """Loads a model, or a pipeline stage, from a folder, after allocating what is on meta.

    Every rank reads the whole tensors of its parameters and keeps its shards.
    """
    folder = Path(folder)
    files = _check_folder(model.config, folder)
    materialize(model, device)
    parameters = {hf_name(model.whole_name(name)): p for name, p in model.named_parameters()}
    for name, tensor in _tensors(folder, {name: files[name] for name in parameters}):
        parameter = parameters[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in {files[name]} but"
                f" {tuple(parameter.shape)} by config.json: the folder is inconsistent; download it"
                " again"
            )
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is of type {str(tensor.dtype).removeprefix('torch.')} in {files[name]}:"
                " quantized weights are not supported; choose another checkpoint"
            )
        fill(parameter, tensor.to(parameter.device))


def check_folder(config: ModelConfig, folder: Path | str) -> set[str]:
    """Returns the files of weights. Raises ValueError unless all are there, for this model."""
    names = set(_check_folder(config, Path(folder)).values())
    for name in names:
        with _reading(Path(folder) / name):
            pass
    return names


def _check_folder(config: ModelConfig, folder: Path) -> dict[str, str]:
    _check_config(config, read_config(folder))
    files = _files(folder)
    _check_names(config, files)
    return files


def save(
    model: Llama,
    folder: Path | str,
    *,
    max_file_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    show: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes a model as a folder that ``transformers`` loads, replacing the weights in it.

    All ranks call this function, since sharded parameters are gathered one by one; rank 0 writes.

    dtype: the type of the saved tensors; by default that of each parameter.
    extra: further entries of ``config.json``, such as ``bos_token_id`` and ``eos_token_id``.
    show: called with the bytes of each file.
    """
    from safetensors.torch import save_file

    if not model.is_whole:
        raise ValueError(
            f"layers [{model.start}, {model.stop}) of {model.config.layers}: only a whole model can"
            " be saved; load all stages into one model from a training checkpoint first"
        )
    raw = to_hf(model.config)
    kept = dtype or next(model.parameters()).dtype
    raw |= {"torch_dtype": str(kept).removeprefix("torch."), **(extra or {})}
    parameters = {hf_name(name): p for name, p in model.named_parameters()}
    sizes = {name: p.numel() * (dtype or p.dtype).itemsize for name, p in parameters.items()}
    files = _split(sizes, max_file_bytes)
    folder, writes = Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()  # an old index, for example, would still be read
    for file, names in files.items():
        held = {}
        for name in names:
            whole = _whole(parameters[name])  # a collective of all ranks
            if writes:
                held[name] = whole.to("cpu", dtype or whole.dtype).contiguous()
        if writes:
            save_file(held, folder / file, metadata={"format": "pt"})
        show(sum(sizes[name] for name in names))
    if writes and WHOLE not in files:
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if writes:
        (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


@torch.no_grad()
def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Returns the tensors of each file of at most ``limit`` bytes, unless one tensor is larger."""
    groups: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        if not groups or size > free:
            groups.append([])
            free = limit
        groups[-1].append(name)
        free -= size
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def _files(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor."""
    if not (folder / INDEX).exists():
        with _reading(folder / WHOLE) as file:
            return dict.fromkeys(file.keys(), WHOLE)
    index = _json(folder / INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(_is_file_name(file) for file in files.values()):
        raise ValueError(
            f"{folder / INDEX} has no weight_map from tensors to files of its folder: it is"
            " damaged; download it again"
        )
    missing = sorted({file for file in files.values() if not (folder / file).is_file()})
    if missing:
        raise ValueError(
            f"{folder / INDEX} names {_listed(missing)}, but the folder has no such file: download"
            " it again"
        )
    return files


def _is_file_name(file: object) -> bool:
    return isinstance(file, str) and "\0" not in file and Path(file).name == file


def _tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in ``files``. Files are memory-mapped, so nothing else is read."""
    for name in sorted(set(files.values())):
        wanted = {key for key, file in files.items() if file == name}
        with _reading(folder / name) as file:
            missing = sorted(wanted - set(file.keys()))
            if missing:
                raise ValueError(f"{name} lacks {_listed(missing)}, which the index places there")
            for key in sorted(wanted):
                yield key, file.get_tensor(key)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_existing(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from None


def _json(path: Path) -> Any:
    _existing(path)
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): download it again") from None


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a folder with {CONFIG} and safetensors")
    return path


def _check_config(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Raises ValueError unless both are equal but for the context, which changes no computation."""
    fields = [name for name in vars(ours) if name != "context"]
    other = [n for n in fields if getattr(ours, n) != getattr(theirs, n)]
    if other:
        differences = ", ".join(f"{n} {getattr(theirs, n)} not {getattr(ours, n)}" for n in other)
        raise ValueError(
            f"the checkpoint has {differences}: keep what its {CONFIG} says, by leaving these out"
            " of model.sizes for distca train, or by read_config(folder) in Python"
        )


def _check_names(config: ModelConfig, found: Iterable[str]) -> None:
    """Raises ValueError unless the tensors found are those of the whole model."""
    expected = {hf_name(name) for name, _ in on_meta(config).named_parameters()}
    # Older files contain rotary frequencies, and some repeat a tied embedding as the output head.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add(OUTPUT)
    missing = sorted(expected - set(found))
    unexpected = sorted(set(found) - expected - ignored)
    if missing or unexpected:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has unexpected {_listed(unexpected)}"] if unexpected else []
        raise ValueError(f"the checkpoint {' and '.join(parts)}: it belongs to another model")


def _listed(names: list[str], most: int = 12) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
