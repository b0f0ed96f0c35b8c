"""verl's FSDP engine: the log-probabilities, losses and updates of its own attention.

verl is not in the pinned environment, so these tests are skipped there (CONTRIBUTING.md).
"""

from __future__ import annotations

from typing import Any

import pytest
from integrations.tiny import assert_close
from ranks import RankFailedError, RankPool

pytest.importorskip("verl", reason="verl is not installed")

from integrations import verl_actor

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "gradients reduced in every micro-batch": {"use_no_sync_for_gradient_accumulation": False},
    "padded to a length": {"pad_to_length": True, "pad_to_length_bucket": 128},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_update_of_an_actor(pair: RankPool, name: str, options: dict[str, Any]) -> None:
    right = pair.run(verl_actor.update, "sdpa", name, options, ranks=2)
    found = pair.run(verl_actor.update, "distca", name, options, ranks=2)
    for ours, exact in zip(found, right, strict=True):
        values, own = ours.old_log_probs.values(), exact.old_log_probs.values()
        assert (values - own).norm() <= 1e-5 * own.norm()
        assert ours.losses == pytest.approx(exact.losses, rel=1e-5, abs=1e-6)
        assert ours.norms == pytest.approx(exact.norms, rel=1e-5)
        assert_close(ours.grads, exact.grads)
        assert ours.sent_bytes > 0
        assert exact.sent_bytes == 0


def test_ulysses_is_refused(pair: RankPool) -> None:
    """A rank would have parts of documents, and take them for documents."""
    options = {"ulysses_sequence_parallel_size": 2}
    with pytest.raises(RankFailedError, match="ulysses_sequence_parallel_size = 2 with attn_impl"):
        pair.run(verl_actor.update, "distca", "llama", options, ranks=2)
