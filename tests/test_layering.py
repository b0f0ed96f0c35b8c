"""Imports run one way, from the command line down to the data.

The source is parsed, not run, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PATHS = sorted(p.relative_to(SRC).as_posix() for p in (SRC / "distca").rglob("*.py"))

# Each sees those before it.
CHAIN = (
    "schema", "data", "planning", "pipeline", "dispatch", "attention", "model", "runtime", "train",
)  # fmt: skip
SEES = {room: {*CHAIN[: i + 1]} for i, room in enumerate(CHAIN)} | {
    "sim": {"schema", "data", "planning", "pipeline", "sim"},
    "measure": {*CHAIN, "measure"},
    "report": {"report"},
    "integrations": {*CHAIN[:-1], "integrations"},
    "cli": {*CHAIN, "measure", "sim", "report", "integrations", "cli"},
    "": set(),  # distca/__init__.py
    "__main__": {"runtime", "cli"},
}
SEES_TYPES = {"report": {"planning"}, "": SEES["cli"]}  # beyond SEES, under TYPE_CHECKING only

# Importing these must not import torch; `dispatch.layout` goes through the other two.
TORCH_FREE = {"schema", "data", "planning", "pipeline", "sim", "report", "cli", "__main__", ""}
TORCH_FREE_MODULES = {"distca.dispatch", "distca.dispatch.rows", "distca.dispatch.layout"}


@dataclass(frozen=True)
class Import:
    target: str  # absolute and dotted, with the name that is taken: distca.planning.plan.Plan
    line: int
    eager: bool  # runs when its module is imported, that is, not inside a function
    types: bool  # stands under `if TYPE_CHECKING:`


def find_imports(
    nodes: Iterable[ast.AST], package: list[str], eager: bool = True, types: bool = False
) -> Iterator[Import]:
    """Every import below `nodes`; `package` is what relative ones start from."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, eager, types)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                for alias in names:
                    target = ".".join([*base, *([module] if module else []), alias.name])
                    yield Import(target, node.lineno, eager, types)
            case ast.If(test=test) if ast.unparse(test).removeprefix("typing.") == "TYPE_CHECKING":
                yield from find_imports(node.body, package, eager, types=True)
                yield from find_imports(node.orelse, package, eager, types)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from find_imports(ast.iter_child_nodes(node), package, False, types)
            case _:
                yield from find_imports(ast.iter_child_nodes(node), package, eager, types)


def find_violations(source: str, path: str) -> list[str]:
    """What `source`, the text of the module at `path` (distca/planning/plan.py), may not import."""
    module, package = module_of(path), path.split("/")[:-1]
    room = room_of(module)
    if room not in SEES:
        return [f"{path}: {room!r} is not a package of the design; known: {', '.join(SEES)}"]
    found = []
    for this in find_imports(ast.parse(source).body, package):
        top, runs = this.target.split(".")[0], this.eager and not this.types
        sees = SEES[room] | (SEES_TYPES.get(room, set()) if this.types else set())
        if top == "distca" and this.target != "distca.__version__":  # other names: from their homes
            if room_of(this.target) not in sees:
                found.append(f"{path}:{this.line}: {room or 'distca'} may not see {this.target}")
        elif top == "torch" and is_torch_free(module) and runs:
            found.append(f"{path}:{this.line}: torch belongs inside the function that needs it")
        elif top in ("matplotlib", "mpl_toolkits", "plotly") and runs:
            found.append(f"{path}:{this.line}: {top} belongs inside the function that plots")
    return found


def module_of(path: str) -> str:
    """distca/data/a.py -> distca.data.a; distca/data/__init__.py -> distca.data."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str:
    """distca.planning.plan -> planning; distca -> the empty string."""
    return module.split(".")[1] if "." in module else ""


def is_torch_free(module: str) -> bool:
    return room_of(module) in TORCH_FREE or module in TORCH_FREE_MODULES


def test_the_source_keeps_the_layering() -> None:
    found = [v for path in PATHS for v in find_violations((SRC / path).read_text(), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("distca/planning/plan.py", "from distca.dispatch.layout import Layout"),
        ("distca/planning/plan.py", "import distca.dispatch.layout as layout"),
        ("distca/planning/plan.py", "from distca import dispatch"),
        ("distca/planning/plan.py", "from distca import Plan"),
        ("distca/cli/plan.py", "import distca"),
        ("distca/planning/plan.py", "from ..dispatch import layout"),
        ("distca/planning/plan.py", "from .. import dispatch"),
        ("distca/planning/__init__.py", "from ..dispatch import layout"),
        ("distca/planning/policies/greedy.py", "from ...dispatch import layout"),
        ("distca/planning/plan.py", "def f():\n    from distca.dispatch import layout"),
        ("distca/planning/plan.py", "if TYPE_CHECKING:\n    from distca.dispatch import layout"),
        ("distca/sim/cluster.py", "from distca.dispatch import layout"),
        ("distca/report/tables.py", "from distca.planning.plan import Plan"),
        ("distca/report/tables.py", "def f():\n    from distca.planning.plan import Plan"),
        ("distca/integrations/megatron.py", "from distca.train import trainer"),
        ("distca/train/trainer.py", "from distca.cli import main"),
        ("distca/__init__.py", "from distca.planning.plan import Plan"),
        ("distca/utils/misc.py", ""),
        ("distca/misc.py", ""),
        ("distca/planning/plan.py", "from distca.utils import misc"),
        ("distca/planning/plan.py", "import torch.nn as nn"),
        ("distca/planning/plan.py", "try:\n    from torch import Tensor\nexcept ImportError: ..."),
        ("distca/planning/plan.py", "class A:\n    import torch"),
        ("distca/planning/plan.py", "if TYPE_CHECKING: ...\nelse:\n    import torch"),
        ("distca/dispatch/layout.py", "import torch"),
        ("distca/dispatch/__init__.py", "import torch"),
        ("distca/report/plan_plots.py", "import matplotlib.pyplot as plt"),
        ("distca/train/metrics.py", "from matplotlib import pyplot"),
        ("distca/report/pages/page.py", "from plotly.offline import get_plotlyjs"),
    ],
)
def test_a_violation_is_refused(path: str, source: str) -> None:
    assert len(find_violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("distca/planning/plan.py", "from distca.data.documents import Document\nimport numpy"),
        ("distca/planning/plan.py", "from .spans import Span\nfrom ..data import documents"),
        ("distca/planning/__init__.py", "from .plan import Plan\nfrom . import spans"),
        ("distca/planning/plan.py", "from distca import __version__, data"),
        ("distca/data/loader.py", "def f():\n    import torch"),
        ("distca/data/loader.py", "if typing.TYPE_CHECKING:\n    import torch"),
        ("distca/dispatch/collective.py", "import torch\nfrom distca.planning import plan"),
        ("distca/report/tables.py", "if TYPE_CHECKING:\n    from distca.planning.plan import Plan"),
        ("distca/report/plan_plots.py", "def f():\n    import matplotlib.pyplot"),
        ("distca/sim/cluster.py", "from distca.planning import plan\nfrom distca.data import a"),
        ("distca/integrations/megatron.py", "import torch\nfrom distca.runtime import mesh"),
        ("distca/cli/plan.py", "from distca import report, sim, train\nfrom . import main"),
        ("distca/__init__.py", "if TYPE_CHECKING:\n    from distca.planning.plan import Plan"),
    ],
)
def test_what_the_design_allows_passes(path: str, source: str) -> None:
    assert find_violations(source, path) == []


LIGHT = [*filter(is_torch_free, map(module_of, PATHS))]


@pytest.mark.parametrize("modules", [["distca"], LIGHT], ids=["distca", "torch-free"])
def test_torch_and_plotting_libraries_are_not_loaded(modules: list[str]) -> None:
    """Run for real, since what a module imports may import more."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert loaded.issuperset(modules)
    assert loaded.isdisjoint({"torch", "matplotlib", "plotly"})
