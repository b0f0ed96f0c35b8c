"""The front door: `distca.NAME` is handed on lazily, but behaves like any other attribute."""

import subprocess
import sys

import pytest

import distca


@pytest.mark.parametrize("name", distca.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(distca, name) is getattr(distca, name)
    assert name in dir(distca)


def test_plan_is_the_function() -> None:
    import distca.planning

    assert callable(distca.plan)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'distca' has no attribute 'plam'$"):
        distca.plam  # noqa: B018


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "distca", "--version"], capture_output=True)
    assert (ran.returncode, ran.stdout) == (0, f"distca {distca.__version__}\n".encode())
