"""torchtitan's metrics with the figures of shared attention, in every place to which it logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

from distca.integrations.shared.figures import sentence_of
from distca.integrations.torchtitan.model_attention import DEFAULT_NAME, ModelAttention


class AttentionMetrics(MetricsProcessor):  # type: ignore[misc]
    """Adds figures to each logging step, and a line on them to the log of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The config of torchtitan's own, and the name that the attention of the model has."""

        name: str = DEFAULT_NAME

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **given: Any) -> None:
        figures = ModelAttention.named(self.config.name).attention.take_figures()
        super().log(*args, extra_metrics={**(extra_metrics or {}), **figures}, **given)
        logger.info(sentence_of(figures))
