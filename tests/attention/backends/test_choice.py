"""The choice of a backend, what each of them refuses, and what a packed call must be."""

import importlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention.oracle import Case, inputs_of

from distca.attention.backends import Traits, choose, fa4, flash
from distca.attention.backends.base import Saved
from distca.attention.backends.choice import backends
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import CAUSAL, FULL, Mask

NAMES = ["fa4", "flash", "sdpa", "blocks", "reference"]
BACKENDS = {backend.name: backend for backend in backends()}
MASKS = frozenset({"causal", "full", "window"})
ON_CPU = Traits("cpu", None, torch.float32, 8, 2, 64, MASKS)
ON_HOPPER = Traits("cuda", (9, 0), torch.bfloat16, 32, 8, 128, MASKS)


def test_auto_on_a_cpu_is_sdpa() -> None:
    assert choose("auto", ON_CPU).name == "sdpa"
    assert choose("auto", replace(ON_CPU, dtype=torch.float64, deterministic=True)).name == "sdpa"
    assert choose("reference", ON_CPU).name == "reference"


def test_auto_asks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend.name for backend in backends()] == NAMES
    monkeypatch.setattr(fa4, "_load", lambda: fa4._Kernels(None))
    monkeypatch.setattr(flash, "_operator_refusal", lambda: None)
    assert choose("auto", ON_HOPPER).name == "fa4"
    assert choose("auto", replace(ON_HOPPER, capability=(8, 0))).name == "flash"
    assert choose("auto", replace(ON_HOPPER, capability=(7, 5))).name == "sdpa"
    assert choose("auto", replace(ON_HOPPER, dtype=torch.float64)).name == "blocks"
    assert choose("auto", replace(ON_HOPPER, softcap=True)).name == "blocks"
    assert choose("auto", replace(ON_CPU, softcap=True)).name == "blocks"


def test_a_named_backend_that_refuses_says_why() -> None:
    with pytest.raises(ValueError, match=r"backend flash refuses: it needs a CUDA device, not cpu"):
        choose("flash", ON_CPU)


def test_an_unknown_name_lists_the_known() -> None:
    known = "auto, fa4, flash, sdpa, blocks, reference"
    with pytest.raises(ValueError, match=rf"'flas' is unknown.*{known}"):
        choose("flas", ON_CPU)


def test_when_none_fits_each_says_why() -> None:
    with pytest.raises(ValueError, match="no attention backend fits") as caught:
        choose("auto", replace(ON_CPU, heads=7, kv_heads=2))
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == NAMES
    assert "7 heads cannot share 2 key/value heads evenly." in lines[-1]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("reference", {"dtype": torch.int64}, "floating dtypes"),
        ("reference", {"kv_heads": 0}, "cannot share 0"),
        ("blocks", {"dtype": torch.int64}, "floating dtypes"),
        (
            "sdpa",
            {"softcap": True},
            "its kernels do not cap scores, forward and backward (softcap)",
        ),
        ("flash", {"softcap": True}, "its kernels do not cap scores"),
        ("fa4", {"softcap": True}, "its kernels do not cap scores"),
        ("sdpa", {"device": "mps"}, "not for mps"),
        ("sdpa", {"dtype": torch.float64}, "on cuda it takes float32, bfloat16, float16, not"),
        ("sdpa", {"head_dim": 66}, "multiple of 4, not 66"),
        ("flash", {"device": "cpu"}, "CUDA device"),
        ("flash", {"capability": (7, 5)}, "8.0 or newer, not 7.5"),
        ("flash", {"dtype": torch.float32}, "bfloat16 and float16, not float32"),
        ("flash", {"head_dim": 264}, "up to 256, not 264"),
        ("flash", {"head_dim": 60}, "multiple of 8"),
        ("flash", {"heads": 6, "kv_heads": 4}, "6 heads cannot share 4"),
        ("fa4", {"device": "cpu"}, "CUDA device"),
        ("fa4", {"capability": (8, 9)}, "9.0 or newer, not 8.9"),
        ("fa4", {"dtype": torch.float32}, "bfloat16 and float16, not float32"),
        ("fa4", {"head_dim": 12}, "multiple of 8"),
        ("fa4", {"capability": (10, 0), "head_dim": 192}, "up to 128"),
        ("fa4", {"capability": (12, 0), "deterministic": True}, "no deterministic mode"),
    ],
)
def test_refusals(name: str, change: dict[str, object], reason: str) -> None:
    refusal = BACKENDS[name].refusal(replace(ON_HOPPER, **change))  # type: ignore[arg-type]
    assert refusal is not None
    assert reason in refusal
    assert refusal.endswith(".")


def test_fa4_refuses_what_it_cannot_import_or_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal_with(module: object) -> str | None:
        def load(name: str) -> object:
            if isinstance(module, Exception):
                raise module
            return module

        fa4._load.cache_clear()
        monkeypatch.setattr(importlib, "import_module", load)
        return BACKENDS["fa4"].refusal(ON_HOPPER)

    def forward(q, k, v, cu_seqlens_q): ...  # type: ignore[no-untyped-def]

    try:
        absent = refusal_with(ModuleNotFoundError("No module named 'flash_attn'"))
        assert "not installed (No module named 'flash_attn')" in (absent or "")
        assert "OSError: no libcuda" in (refusal_with(OSError("no libcuda")) or "")
        assert "has no _flash_attn_fwd" in (refusal_with(SimpleNamespace()) or "")
        old = SimpleNamespace(_flash_attn_fwd=forward)
        assert "lacks causal, cu_seqlens_k" in (refusal_with(old) or "")
    finally:
        fa4._load.cache_clear()


@pytest.mark.parametrize("mask", [Mask(CAUSAL), Mask(FULL), Mask(64)])
def test_calls_of_short_tasks_ask_fa4_for_the_kernels_of_long_ones(mask: Mask) -> None:
    """Where the longest task fits into a tile, it would compile others."""
    short, long = (
        fa4._arguments(PackedCall.of(mask, offsets, offsets, "cpu"))
        for offsets in (np.array([0, 100, 170]), np.array([0, 100, 4000]))
    )
    assert short["max_seqlen_q"] == short["max_seqlen_k"] == 512
    assert long["max_seqlen_q"] == long["max_seqlen_k"] == 3900


def test_the_operators_of_this_torch_are_the_ones_flash_calls() -> None:
    """A CPU build has no flash kernels, but it has the operators' signatures."""
    for name, needed in flash._ARGUMENTS.items():
        schema = getattr(torch.ops.aten, name).default._schema
        assert set(needed) <= {argument.name for argument in schema.arguments}


def test_importing_loads_no_optional_library() -> None:
    code = "import sys, distca.attention.backends; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "distca.attention.backends.base" in loaded.split()
    assert not {"flash_attn", "cutlass", "triton"} & set(loaded.split())


def test_traits_of_tensors() -> None:
    q, k = torch.empty(5, 8, 16, dtype=torch.bfloat16), torch.empty(9, 2, 16, dtype=torch.bfloat16)
    masks = [Mask(CAUSAL), Mask(FULL), Mask(7), Mask(9)]
    assert Traits.of(TensorSpec.of(q, k, k), masks, deterministic=True) == Traits(
        "cpu", None, torch.bfloat16, 8, 2, 16, MASKS, True, False, 16
    )
    assert Traits.of(TensorSpec.of(q, k, k), masks, softcap=True).softcap


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("causal", (-1, 0)),
        ("full", (-1, -1)),
        ("window:4", (3, 0)),
        ("window:1", (0, 0)),
        ("window:9", (-1, 0)),  # it reaches every key there is
        (f"window:{1 << 35}", (-1, 0)),
    ],
)
def test_a_call_has_the_window_of_flash_kernels(mask: str, window: tuple[int, int]) -> None:
    packed = Case(((3, 9), (1, 2)), mask).call()
    assert packed.window == window
    assert packed.q_offsets.tolist() == list(packed.q_bounds) == [0, 3, 4]
    assert packed.kv_offsets.tolist() == list(packed.kv_bounds) == [0, 9, 11]
    assert packed.q_offsets.dtype == packed.kv_offsets.dtype == torch.int32
    assert (packed.max_queries, packed.max_keys) == (3, 9)
    assert packed.lengths == [(3, 9), (1, 2)]


@pytest.mark.parametrize(
    ("mask", "task"), [("causal", (3, 2)), ("window:2", (2, 1)), ("full", (1, 0))]
)
def test_queries_without_their_keys_are_refused(mask: str, task: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"task 1 has {task[0]} queries and {task[1]} keys"):
        Case(((1, 1), task), mask).call()


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = Case(((2, 3),))
    x, packed, backend = inputs_of(case, torch.float32), case.call(), choose("sdpa", ON_CPU)
    with pytest.raises(ValueError, match="packs 2 queries and 3 keys"):
        backend.forward(x.q[:1], x.k, x.v, packed, 1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        backend.forward(x.q, x.k, x.v[:, :1], packed, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        backend.forward(x.q, x.k.double(), x.v, packed, 1.0)
    out, lse = backend.forward(x.q, x.k, x.v, packed, 1.0)
    with pytest.raises(ValueError, match=r"lse is \[4, 2\], not \[2, 4\]"):
        backend.backward(x.grad_out, Saved(x.q, x.k, x.v, out, lse.t()), packed, 1.0)
