"""Data loaders whose batches carry their plans, for transformers' Trainer, Accelerate and loops."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from distca.integrations.shared.planned import PlannedAttention
from distca.integrations.shared.prefetch import prefetch
from distca.integrations.transformers.batches import attach, documents_of, filler


class PrefetchingLoader(DataLoader[Any]):
    """A DataLoader that iterates over another loader and plans its batches in advance.

    It subclasses DataLoader because trainers check for that type. It has no dataset, sampler or
    workers of its own, so it does not call the constructor of DataLoader: every attribute that it
    lacks is that of the loader it wraps.

    loader: an iterable of mappings with the arguments of a model.
    depth: how many batches it reads in advance.
    """

    def __init__(self, loader: Iterable[Any], attention: PlannedAttention, *, depth: int) -> None:
        self._loader, self._attention, self._depth = loader, attention, depth

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return prefetch(
            self._loader,
            self._attention,
            documents_of=documents_of,
            attach=attach,
            filler=filler,
            depth=self._depth,
            deferred=True,  # until a forward pass has been launched, see ``calls.watch``
        )

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet while this object is copied
            raise AttributeError(name)
        return getattr(self._loader, name)


def plan_ahead(loader: Any, attention: PlannedAttention) -> Any:
    """Returns the loader with planned batches.

    A loader that Accelerate prepared already reads one batch in advance, so it is not wrapped but
    changed in place if that is possible: the loader inside it is wrapped.
    """
    if wraps_loader(loader):
        inner = loader.base_dataloader
        if not isinstance(inner, PrefetchingLoader):
            loader.base_dataloader = PrefetchingLoader(inner, attention, depth=0)
        return loader
    reads_ahead = hasattr(loader, "end_of_dataloader")  # an attribute of Accelerate's loaders
    return PrefetchingLoader(loader, attention, depth=0 if reads_ahead else 1)


def wraps_loader(loader: Any) -> bool:
    """Tells whether it is a loader of Accelerate that reads from another loader on each rank."""
    return type(loader).__name__ == "DataLoaderShard" and "base_dataloader" in vars(loader)
