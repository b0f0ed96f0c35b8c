"""Which NCCL the ranks of this machine use, and a newer one for ranks that share a GPU.

NCCL lets ranks share a GPU from version 2.30 on. An older torch runs with such a library too, if it
is loaded before torch's own one (LD_PRELOAD).
"""

import os
import subprocess
import sys
from ctypes import CDLL, byref, c_int
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY = "DISTCA_NCCL_LIBRARY"  # environment variable with the path of the library to use
PACKAGE = "nvidia-nccl-cu{}"  # of a version of CUDA, which has to be that of torch
IN_PACKAGE = "nvidia/nccl/lib/libnccl.so.2"
SHARING = 23000  # the first version whose ranks can share a GPU, as ncclGetVersion returns it
# In a process of its own, since a damaged library may end the process that loads it.
ASK = (
    "import sys; from ctypes import *; version = c_int();"
    " CDLL(sys.argv[1]).ncclGetVersion(byref(version)); print(version.value)"
)
ASK_S = 60


@dataclass(frozen=True)
class Nccl:
    version: int
    preload: Path | None  # the library to load; None for that of torch

    def __str__(self) -> str:
        return f"NCCL {version_text(self.version)}" + (
            f" of {self.preload}" if self.preload else ""
        )


def find_nccl() -> Nccl:
    """Returns an NCCL with which ranks can share a GPU, or raises ValueError.

    That is the library of DISTCA_NCCL_LIBRARY if it is set, else torch's own if it is new enough,
    else that of an installed package.
    """
    if given := os.environ.get(LIBRARY):
        version = file_version(Path(given))
        if version < SHARING:
            raise ValueError(
                f"{LIBRARY} is {given}, which is NCCL {version_text(version)}: ranks can share a"
                f" GPU from {version_text(SHARING)} on; give a newer one"
            )
        return Nccl(version, Path(given).resolve())
    own = loaded_version()
    if own >= SHARING:
        return Nccl(own, None)
    installed = _installed()
    if installed is not None and (version := file_version(installed)) >= SHARING:
        return Nccl(version, installed)
    raise ValueError(
        f"ranks can share a GPU from NCCL {version_text(SHARING)} on, torch has"
        f" {version_text(own) if own else 'none'}, and no newer one is installed:"
        f" pip install -U {_package()}, or set {LIBRARY} to a libnccl.so.2"
    )


def loaded_version() -> int:
    """Returns the version of the NCCL that torch has loaded in this process; 0 without one.

    ``torch.cuda.nccl.version`` is that of the headers with which torch was compiled.
    """
    import torch

    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    of_torch = [line[line.index("/") :] for line in lines if "/libnccl.so" in line]
    for path in (None, *of_torch):  # None: a library that was preloaded, under any name
        library, version = CDLL(path), c_int()
        if hasattr(library, "ncclGetVersion"):
            library.ncclGetVersion(byref(version))
            return version.value
    if not hasattr(torch._C, "_nccl_version"):
        return 0
    major, minor, patch, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(major * 10_000 + minor * 100 + patch)


def file_version(path: Path) -> int:
    """Returns the version of the NCCL in a file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the path of a libnccl.so.2")
    ask = [sys.executable, "-I", "-c", ASK, str(path.resolve())]
    ran = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_S)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        raise ValueError(f"{path} cannot be loaded as NCCL ({why}): give another libnccl.so.2")
    return int(ran.stdout)


def version_text(version: int) -> str:
    """Returns 23007 as 2.30.7."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def _package() -> str:
    """Returns the pip package with the NCCL for torch's version of CUDA.

    Those of different versions are installed to the same file.
    """
    import torch

    return PACKAGE.format((torch.version.cuda or "13").partition(".")[0])


def _installed() -> Path | None:
    """Returns the library of this package, if it is installed."""
    try:
        path = Path(str(distribution(_package()).locate_file(IN_PACKAGE)))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
