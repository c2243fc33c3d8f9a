"""Writing a checkpoint so that a kill at any moment leaves the previous one whole and found.

The order is the whole point: stage, flush, hash, manifest, rename, marker, `latest`, and only then
delete what is older. Nothing is a checkpoint before its marker is there, and an old one loses its
marker before its first file.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from fmengine.checkpoint.collective import Collective, agree, agree_on_first
from fmengine.checkpoint.files import digest, digest_text, fsync, list_files, list_folders, remove_tree, write_atomic
from fmengine.checkpoint.find import CHECKPOINTS, LATEST, folder_name, step_folders, verify
from fmengine.checkpoint.manifest import COMPLETE, ENGINE, MANIFEST, FileRecord, Header, complete
from fmengine.checkpoint.owner import RunOwner
from fmengine.errors import UserError

log = logging.getLogger(__name__)

STAGING = ".staging-"


def save(
    run_dir: Path,
    header: Header,
    write: Callable[[Path], None],
    *,
    collective: Collective,
    keep: int,
    owner: RunOwner | None = None,
) -> Path:
    """Write the checkpoint of `header.step`; collective over all ranks.

    A step that is already there and whole is left as it is: the state of a step is the same
    however often it is reached.

    Args:
        run_dir: the run folder, which exists and which every rank sees.
        header: what the manifest says (rank 0's is used).
        write: writes this rank's state into the folder it is given, leaving no other rank waiting
            when it fails.
        collective: the ranks.
        keep: how many whole checkpoints stay, this one included.
        owner: rank 0's claim on the run folder, checked before anything becomes visible.

    Returns:
        The step folder.

    Raises:
        UserError: on every rank, when the disk is full or refuses, or the run folder has another
            owner. The previous checkpoints are untouched.
        RuntimeError: on every rank, when `write` fails otherwise.
    """
    task = f"saving step {header.step}"
    target = run_dir / CHECKPOINTS / folder_name(header.step)
    # compared byte for byte: a damaged one was passed over when the run started, and comes by here again
    if agree_on_first(collective, lambda: _is_whole(target, full=True), task):
        log.warning("%s is already there and whole; left as it is", target)
        return target
    staging = agree_on_first(collective, lambda: _prepare(target, owner), task)
    try:
        agree(collective, lambda: write(staging / ENGINE), task)
        files = _hash_shares(staging, collective, task)
        agree_on_first(collective, lambda: _finish(staging, target, header, files, keep, owner), task)
    except Exception:  # on every rank, so that nobody writes any more
        if collective.rank == 0:
            _give_room_back(staging, owner)
        raise
    return target


def _give_room_back(staging: Path, owner: RunOwner | None) -> None:
    """A save that failed on a full disk leaves it no fuller, unless another process is at work there by now."""
    with contextlib.suppress(OSError, UserError):
        if owner is not None:
            owner.check()
        remove_tree(staging)


def _is_whole(target: Path, full: bool = False) -> bool:
    if not target.exists():
        return False
    try:
        verify(target, full)
    except UserError:
        return False
    return True


def _prepare(target: Path, owner: RunOwner | None) -> Path:
    """Clear what killed attempts left (any staging folder, a folder of this step without its marker)."""
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    if owner is not None:
        owner.check()
    for stale in root.glob(f"{STAGING}*"):
        remove_tree(stale)
    if target.exists():
        _retire(target)
    staging = root / f"{STAGING}{target.name}"
    (staging / ENGINE).mkdir(parents=True)
    return staging


def _hash_shares(staging: Path, collective: Collective, task: str) -> dict[str, FileRecord]:
    """Flush and hash every file of the staging folder, split over the ranks; complete on rank 0 only.

    A writer on another node has flushed its own files (`durable`): this flush covers the rest.
    """
    names: list[str] = agree_on_first(collective, lambda: list_files(staging), task)

    def share() -> dict[str, FileRecord]:
        return {name: _flush_and_hash(staging / name) for name in names[collective.rank :: collective.world_size]}

    shares = collective.gather_object(agree(collective, share, task))
    return {name: record for part in shares or [] for name, record in part.items()}


def _flush_and_hash(path: Path) -> FileRecord:
    fsync(path)
    return FileRecord(bytes=path.stat().st_size, digest=digest(path))


def _finish(
    staging: Path, target: Path, header: Header, files: dict[str, FileRecord], keep: int, owner: RunOwner | None
) -> None:
    """Rank 0: from a staging folder that is all there to a checkpoint, and the old ones away."""
    text = complete(header, files).text()
    write_atomic(staging / MANIFEST, text)
    for folder in list_folders(staging):
        fsync(folder)
    if owner is not None:
        owner.check()
    staging.rename(target)
    fsync(target.parent)
    write_atomic(target / COMPLETE, digest_text(text) + "\n")
    write_atomic(target.parent / LATEST, target.name + "\n")
    _delete_old(target, header.step, keep)


def _delete_old(target: Path, step: int, keep: int) -> None:
    """Leave the `keep` newest whole checkpoints up to this one; broken ones among them do not count.

    The new one is whole by now, so an old one that does not go (a file held open on NFS) is only logged.
    """
    whole = 0
    for older, folder in step_folders(target.parent.parent):
        if older > step:
            continue
        if whole < keep and _is_whole(folder):
            whole += 1
        elif whole >= keep or not (folder / COMPLETE).exists():
            try:
                _retire(folder)
            except OSError as error:
                log.warning("%s: could not be deleted: %s", folder, error)


def _retire(folder: Path) -> None:
    """Delete a checkpoint so that a kill in the middle leaves something that is no checkpoint."""
    if folder.is_dir():
        remove_tree(folder / COMPLETE)
        fsync(folder)
    remove_tree(folder)
