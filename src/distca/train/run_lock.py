"""A lock on the folder of a run, which ends with the process that holds it, however it ends."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from distca.runtime.disk import check_plain, writing
from distca.train import fault_log, metrics

NAME = "run.lock"
REPLACED = (metrics.FILE, metrics.TICKS)  # by a new file beside them
# What a run writes into its folder, or into those of its sides.
WRITTEN = (
    NAME, "config.json", *REPLACED, *(str(Path(name).with_suffix(".new")) for name in REPLACED),
    metrics.ABANDONED, fault_log.NAME, fault_log.ABANDONED, "traces/trace.json",
)  # fmt: skip
LOGS = "logs/**/rank-*.log"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class RunLock:
    """Holds the folder of a run until ``release``, or until this process is gone.

    The kernel holds the lock, on NFS for all nodes, and frees it with its process. The file says
    who holds it, and stays behind; it means nothing by itself. On a file system without locks the
    folder is not protected.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if another run holds the folder, with who it is.

        Also if a link is where a run writes a file, which may be one of somebody else.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            check_plain(parent / name for name in WRITTEN)
        check_plain(folder.glob(LOGS))
        self._file = (folder / NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ValueError(
                f"{folder} is in use by {holder}: wait for it or stop it, or use another folder"
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with writing(folder):
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            self._file.flush()

    def release(self) -> None:
        self._file.close()
