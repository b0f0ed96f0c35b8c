"""The names of length distributions, without numpy, so that help texts can list them."""

NAMES = ("pretrain", "prolong", "reasoning", "agent", "chat", "lognormal", "fixed")
FORMS = (
    "pretrain, prolong, prolong:SHARE, reasoning, agent, chat, lognormal:MEDIAN:SIGMA or fixed:N"
)


def names_distribution(spec: str) -> bool:
    """Returns whether ``spec`` names a distribution, even if its numbers are wrong."""
    return spec.partition(":")[0] in NAMES
