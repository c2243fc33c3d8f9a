"""File operations that survive a power cut: flushed, renamed into place, hashed.

A rename is atomic on every file system we meet, but it is only durable once the file before it and
the folder around it have been flushed; these helpers keep that order in one place.
"""

import hashlib
import os
import shutil
from pathlib import Path

HASH = "sha256"
"""hashlib's fastest strong hash where the CPU has SHA instructions (1.7 GB/s a core against blake2b's 0.7)."""


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replace a small text file as a whole, durably: readers see the old text or the new one."""
    staged = path.with_name(f".{path.name}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    fsync(path.parent)


def list_files(root: Path) -> list[str]:
    """Every regular file below `root`, as sorted POSIX paths relative to it."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def list_folders(root: Path) -> list[Path]:
    """`root` and every folder below it, deepest first: the order in which they are flushed."""
    return sorted((path for path in [root, *root.rglob("*")] if path.is_dir()), reverse=True)


def digest(path: Path, algorithm: str = HASH) -> str:
    """Hex digest of a file's bytes; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def digest_text(text: str) -> str:
    """Hex digest of a text's UTF-8 bytes, under `HASH`."""
    return hashlib.new(HASH, text.encode()).hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing there is fine. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
