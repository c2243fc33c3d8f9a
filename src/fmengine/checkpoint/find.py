"""Which checkpoints of a run are whole, and the newest of them.

The folders themselves are asked; the file `latest` is only a hint for people, because it may lag by
one checkpoint when a run is killed.
"""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fmengine.checkpoint.files import digest, digest_text
from fmengine.checkpoint.manifest import COMPLETE, MANIFEST, FormatError, Manifest, parse
from fmengine.errors import UserError

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
LATEST = "latest"
HASH_THREADS = 4
"""Files hashed at once; hashlib lets go of the interpreter, and more threads only fight over the disk."""

_STEP = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """`step-00000100`: names sort like their steps."""
    return f"step-{step:08d}"


def step_folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Every (step, folder) below RUN/checkpoints that is named like a checkpoint, newest first, whole or not."""
    root = run_dir / CHECKPOINTS
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(found, reverse=True)


def verify(checkpoint: Path, full: bool = True) -> Manifest:
    """Check that a checkpoint is whole, and return its manifest.

    Args:
        checkpoint: a step folder.
        full: read every file and compare its digest; else names and sizes only.

    Raises:
        UserError: the marker is missing or of another manifest, a file is missing, of another size
            or changed, or the format is newer than this version reads.
    """
    manifest = _vouched_manifest(checkpoint)
    for name, record in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise UserError(f"{path}: missing; resume from another checkpoint")
        size = path.stat().st_size
        if size != record.bytes:
            raise UserError(f"{path}: {size} bytes instead of {record.bytes}; resume from another checkpoint")
    if full:
        check_digests(checkpoint, manifest)
    return manifest


def find_newest(run_dir: Path, full: bool = False) -> Path | None:
    """The newest whole checkpoint of a run, or None.

    Args:
        run_dir: the run folder.
        full: compare digests too, not only marker, manifest, names and sizes.

    Staging folders are no checkpoints; a broken one is passed over with a logged line that says why.

    Raises:
        FormatError: the newest one is whole but of a format that this version does not read: to pass it
            over would silently throw away training.
    """
    for _, path in step_folders(run_dir):
        try:
            verify(path, full)
        except FormatError:
            raise
        except UserError as error:
            log.warning("passed over a broken checkpoint: %s", error)
        else:
            return path
    return None


def resolve(checkpoint_or_run: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of the run folder.

    Raises:
        UserError: it is neither, or the run has no whole checkpoint.
    """
    if (checkpoint_or_run / MANIFEST).is_file():
        verify(checkpoint_or_run, full=False)
        return checkpoint_or_run
    if not checkpoint_or_run.is_dir():
        raise UserError(f"{checkpoint_or_run}: no such folder; give a run folder or one of its checkpoints/step-*")
    newest = find_newest(checkpoint_or_run)
    if newest is None and (checkpoint_or_run / "config.json").is_file():
        raise UserError(f"{checkpoint_or_run}: a model of Hugging Face, not a run; use it with Transformers")
    if newest is None:
        raise UserError(f"{checkpoint_or_run}: no whole checkpoint in it; give a run folder or a checkpoint")
    return newest


def run_of(checkpoint: Path) -> Path:
    """The run folder around RUN/checkpoints/step-…."""
    return checkpoint.absolute().parent.parent


def _vouched_manifest(checkpoint: Path) -> Manifest:
    marker, path = checkpoint / COMPLETE, checkpoint / MANIFEST
    try:
        vouched = marker.read_text(encoding="utf-8").strip()
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{checkpoint}: {error}; resume from another checkpoint") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; the save did not end") from None
    if vouched != digest_text(text):
        raise UserError(f"{path}: not what {COMPLETE} vouches for; resume from another checkpoint")
    return parse(text, path)


def check_digests(checkpoint: Path, manifest: Manifest) -> None:
    """Compare every file's content with the manifest; raises UserError, a line for each that has changed."""

    def check(name: str) -> str | None:
        try:
            return None if digest(checkpoint / name, manifest.hash) == manifest.files[name].digest else name
        except OSError:
            return name

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        changed = [name for name in pool.map(check, manifest.files) if name is not None]
    if changed:
        raise UserError(
            [f"{checkpoint / name}: not what was written; resume from another checkpoint" for name in changed]
        )
