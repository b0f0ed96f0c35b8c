"""Where the figures of a run go besides ``metrics.jsonl``: TensorBoard, W&B and Prometheus.

Each tracker takes a step and its figures: single numbers by name, and lists with one number for
each rank. Names have no spaces, so they are the same everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from distca.runtime.disk import writing
from distca.train.config import LogSection

Record = Mapping[str, Any]
LOCALHOST = "127.0.0.1"
PROMETHEUS_FILE = "metrics.prom"


# The package that each key of the config needs; its extra of distca has the name of the key.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}


def check_trackers(config: LogSection) -> None:
    """Raises ValueError if a package is missing that the config asks for."""
    for name, package in PACKAGES.items():
        if getattr(config, name) and find_spec(package) is None:
            raise ValueError(
                f"log.{name} is set, but {package} is not installed: pip install 'distca[{name}]'"
            )


class Tracker(Protocol):
    def write(self, step: int, figures: Mapping[str, float], ranks: Record) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers that a config asks for."""

    def __init__(self, config: LogSection, folder: Path, values: Record) -> None:
        self._opened = ExitStack()
        self._trackers: list[Tracker] = []
        for tracker in _asked_for(config, folder, values):
            self._trackers.append(tracker)
            self._opened.callback(tracker.close)

    def write(self, record: Record) -> None:
        figures = {name: float(value) for name, value in record.items() if _is_number(value)}
        step = int(figures.pop("step"))
        ranks = record.get("ranks", {})
        for tracker in self._trackers:
            tracker.write(step, figures, ranks)

    def close(self) -> None:
        self._opened.close()


def _asked_for(config: LogSection, folder: Path, values: Record) -> Iterator[Tracker]:
    if config.tensorboard:
        yield TensorBoard(folder / "tensorboard")
    if config.wandb:
        yield WeightsAndBiases(config.wandb, folder, values)
    if config.prometheus:
        yield Prometheus(folder / PROMETHEUS_FILE, config.prometheus_port)


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def write(self, step: int, figures: Mapping[str, float], ranks: Record) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which goes on under the same id when training resumes."""

    def __init__(self, project: str, folder: Path, values: Record) -> None:
        import wandb

        identity = folder / "wandb-id"
        if not identity.exists():
            with writing(identity):
                identity.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(folder),
                config=dict(values),
            )
        except wandb.Error as error:
            raise ValueError(
                f"W&B cannot start ({error}): log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None

    def write(self, step: int, figures: Mapping[str, float], ranks: Record) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """The figures of the newest step, in a file or on a port of this machine.

    The file is that of the text-file collector of Prometheus' node exporter; it is replaced as a
    whole after each step.
    """

    def __init__(self, path: Path, port: int) -> None:
        import prometheus_client

        self._client, self._path = prometheus_client, path
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        if port:
            try:
                self._server, _ = prometheus_client.start_http_server(
                    port, addr=LOCALHOST, registry=self._registry
                )
            except OSError as error:
                raise ValueError(
                    f"log.prometheus_port = {port} cannot be opened ({error.strerror}): choose"
                    " another one, or 0 for a file alone"
                ) from None

    def write(self, step: int, figures: Mapping[str, float], ranks: Record) -> None:
        for name, value in {"step": float(step), **figures}.items():
            self._gauge(name).set(value)
        for name, values in ranks.items():
            for rank, value in enumerate(values):
                self._gauge(f"rank_{name}", "rank").labels(str(rank)).set(value)
        with writing(self._path):
            self._client.write_to_textfile(str(self._path), self._registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _gauge(self, name: str, *labels: str) -> Any:
        if name not in self._gauges:
            text = f"{name} of the newest step of distca train"
            self._gauges[name] = self._client.Gauge(
                f"distca_{name}", text, labels, registry=self._registry
            )
        return self._gauges[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
