"""One run folder, one owner: two jobs that both resume one run would overwrite each other's state.

Rank 0 holds a POSIX lock on RUN/owner, which the system releases when the process dies, however it
dies. Where a file system has no locks (some mounts of parallel ones), the file still names its
owner, and `check`, called at every save, notices that another process has written itself there.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from fmengine.errors import UserError

log = logging.getLogger(__name__)

OWNER = "owner"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunOwner:
    """The claim of this process on a run folder; a context manager.

    Raises:
        UserError: another process holds the folder; the line names its host, process id and start.
        OSError: the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / OWNER
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._identity = json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        )
        try:
            self._lock(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._identity.encode(), 0)
            os.fsync(self._descriptor)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise UserError when the run folder is no longer this process's."""
        written = ""
        if not self._path.exists():
            raise UserError(
                f"{self._path}: gone, and maybe the run folder with it; this process stops saving: start it again"
            )
        if self._descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                    written = _read(self._descriptor)
        if written != self._identity:
            raise UserError(
                f"{self._path}: the run folder was taken over by {_who(written)}; "
                "this process stops saving, so that it overwrites nothing"
            )

    def close(self) -> None:
        """Give the folder up."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunOwner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                owner = _who(_read(descriptor))
                raise UserError(
                    f"{self._path.parent}: the run folder is in use by {owner}; stop that run or choose another run.dir"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: this file system has no locks; a second process is noticed only at a save", self._path)


def _read(descriptor: int) -> str:
    """The file's text through the descriptor that is there: closing a second one would give up a POSIX lock."""
    return os.pread(descriptor, 4096, 0).decode(errors="replace")


def _who(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
    return "another process"
