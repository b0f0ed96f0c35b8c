"""Settings for all tests: the same examples on every machine, and shared modules importable."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Test files are imported one by one (importlib mode), so what they share needs a place on the path.
sys.path.insert(0, str(Path(__file__).parent))

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE
)
settings.register_profile(
    "search", max_examples=1000, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.load_profile("ci")
