"""Core attention disaggregation for long-context language-model training.

The public names are imported when they are first used. `import distca` is therefore fast and loads
neither torch nor matplotlib.
"""

from importlib import import_module

__version__ = "0.1.0"

__all__ = [
    "Config",
    "CoreAttention",
    "Latent",
    "Layout",
    "Placement",
    "Plan",
    "PlanOptions",
    "Trainer",
    "__version__",
    "place",
    "plan",
]

TYPE_CHECKING = False  # of typing, which takes a while to import
if TYPE_CHECKING:
    from distca.attention.core import CoreAttention
    from distca.dispatch.latent import Latent
    from distca.dispatch.layout import Layout
    from distca.planning.api import place, plan
    from distca.planning.options import PlanOptions
    from distca.planning.placement import Placement
    from distca.planning.plan import Plan
    from distca.train.config import Config
    from distca.train.trainer import Trainer
else:  # hidden from type checkers, which would otherwise accept any name at all
    _MODULES = {
        "Config": "train.config",
        "CoreAttention": "attention.core",
        "Latent": "dispatch.latent",
        "Layout": "dispatch.layout",
        "Placement": "planning.placement",
        "Plan": "planning.plan",
        "PlanOptions": "planning.options",
        "Trainer": "train.trainer",
        "place": "planning.api",
        "plan": "planning.api",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'distca' has no attribute {name!r}")
        module = import_module(f"distca.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
