"""A machine with a GPU, made of files: MPS, the CUDA driver and NCCL, as far as launchers use them.

The daemon of the fake MPS is a real process with a server of its own, so tests can see what is left
behind. A process that uses the fake driver makes the daemon start that server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROL = """#!{python}
import os, signal, socket, subprocess, sys, time
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
note = open({events!r}, "a", buffering=1)
if sys.argv[1:] == ["-d"]:
    if os.environ.get("FAKE_MPS") == "refuses":
        sys.exit("An instance of this daemon is already running")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(pipes + "/control")
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    open({pids!r}, "a").write(f"{{os.getpid()}}\\n")
    open({pipes!r}, "a").write(f"{{pipes}}\\n")
    gpus, preload = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("LD_PRELOAD")
    note.write(f"daemon started, GPUs {{gpus}}, preload {{preload}}\\n")
    server = None
    while True:
        peer, _ = listener.accept()
        command = peer.recv(99).decode().split() or ["nothing"]
        if command[0] == "connect" and server is None and os.environ.get("FAKE_MPS") != "idle":
            server = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
            open({pids!r}, "a").write(f"{{server.pid}}\\n")
        if command[0] == "get_server_list" and server is not None:
            peer.send(f"{{server.pid}}\\n".encode())
        if command[0] == "quit" and os.environ.get("FAKE_MPS") != "stays":
            os.unlink(pipes + "/control")
            peer.close()
            listener.close()
            time.sleep(0.5)  # clients are told to go
            if server is not None:
                server.kill()
                server.wait()
            note.write("daemon ended\\n")
            os._exit(0)
        peer.close()
client = socket.socket(socket.AF_UNIX)
try:
    client.connect(pipes + "/control")
except OSError:
    sys.exit("Cannot find MPS control daemon process")
command = " ".join(sys.argv[1:]) or sys.stdin.readline()
if not command:
    sys.exit()  # whoever asked has been killed
client.send(command.encode())
sys.stdout.write(client.recv(99).decode())
"""

DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(int flags) {
  if (getenv("FAKE_CUDA_HANGS")) { for (;;) sleep(1); }
  system("nvidia-cuda-mps-control connect > /dev/null 2>&1");
  char *error = getenv("FAKE_CUDA_ERROR"), *until = getenv("FAKE_CUDA_READY_AFTER");
  if (until) { /* a file with a line for each attempt so far */
    char command[500] = "echo >> ";
    system(strcat(command, until));
    char count[500] = "test $(wc -l < ";
    if (system(strcat(strcat(count, until), ") -ge 3")) == 0) return 0;
  }
  return error ? atoi(error) : 0;
}
int cuGetErrorString(int code, const char **text) { *text = "a fake error"; return 0; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "Fake 100"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 66; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  *free = (size_t)atoi(getenv("FAKE_FREE_GIB")) << 30;
  *total = (size_t)80 << 30;
  return 0;
}
"""


@dataclass(frozen=True)
class FakeGpu:
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @classmethod
    def make(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
        """Makes the files, and an environment in which they are found."""
        fake = cls(folder, monkeypatch)
        control = folder / "nvidia-cuda-mps-control"
        files = {name: str(folder / name) for name in ("events", "pids", "pipes")}
        control.write_text(CONTROL.format(python=sys.executable, **files))
        control.chmod(0o755)
        compile_library(DRIVER, folder / "libcuda.so.1")
        fake.set(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}", LD_LIBRARY_PATH=str(folder))
        fake.set(FAKE_FREE_GIB="80", DISTCA_NCCL_LIBRARY=str(fake.nccl("2.30.7")))
        for name in (
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_VISIBLE_DEVICES",
            "NCCL_MAX_CTAS",
            "NCCL_CGA_CLUSTER_SIZE",
        ):
            monkeypatch.delenv(name, raising=False)
        return fake

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def pids(self) -> Path:
        return self.folder / "pids"

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def nccl(self, version: str) -> Path:
        """Makes a library that says that it is this version of NCCL."""
        major, minor, patch = map(int, version.split("."))
        code = major * 10_000 + minor * 100 + patch
        path = self.folder / version / "libnccl.so.2"
        path.parent.mkdir(exist_ok=True)
        compile_library(f"int ncclGetVersion(int *v) {{ *v = {code}; return 0; }}", path)
        return path

    def clean(self) -> None:
        """Removes what a launcher that was killed has left: a process of a failed test, pipes."""
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        pipes = self.folder / "pipes"
        for folder in pipes.read_text().split() if pipes.exists() else ():
            shutil.rmtree(folder, ignore_errors=True)

    def running(self) -> list[int]:
        """Returns the process ids of the daemon and its server that are still there."""
        found = []
        for pid in self.pids.read_text().split() if self.pids.exists() else ():
            stat = Path(f"/proc/{pid}/stat")
            try:
                state = stat.read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z":
                found.append(int(pid))
        return found


def compile_library(source: str, path: Path) -> None:
    quiet = ["-w", "-fPIC", "-shared", "-x", "c"]
    subprocess.run(["cc", *quiet, "-o", str(path), "-"], input=source, text=True, check=True)
