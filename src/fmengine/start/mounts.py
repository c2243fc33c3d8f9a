"""What is mounted where in the container: which paths are the image's own and which the host's.

Source of the format: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

KERNEL = ("proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs", "tmpfs", "debugfs", "securityfs")
"""File systems with none of the user's files."""

OWN = tuple(map(Path, ("/proc", "/sys", "/dev", "/etc", "/run", "/var/run", "/usr", "/.singularity.d", "/var/lib")))
"""Where a runtime binds files that it needs itself."""


@dataclass(frozen=True)
class Mount:
    """A mount: where, the device's major:minor number, the file system's kind."""

    point: Path
    device: str
    kind: str


def parse(text: str) -> tuple[Mount, ...]:
    """The mounts of a mountinfo file, in its order; lines of another form are left out."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if separator and len(fields) >= 6 and right:
            found.append(Mount(Path(_unescape(fields[4])), fields[2], right.split()[0]))
    return tuple(found)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a path without symbolic links lies on; of two at one place, the later."""
    best = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount
    return best


def is_image(path: Path, image: Path, mounts: Sequence[Mount]) -> bool:
    """Whether a path lies on the image's own file system.

    Args:
        path: any path, without symbolic links.
        image: a folder that is the image's for sure.
        mounts: all mounts. Apptainer without overlays mounts each of the image's folders by itself, so it is
            the device that counts and not the mount point; then the root is a file system of its own.
    """
    mount, own = mount_of(path, mounts), mount_of(image, mounts)
    if mount is None or own is None:
        return False
    return mount.point == Path("/") or mount.device == own.device


def bound(image: Path, mounts: Sequence[Mount]) -> list[Path]:
    """Folders of the host that are bound in, without what the runtimes bind for themselves; sorted."""
    return sorted(
        {
            mount.point
            for mount in mounts
            if mount.kind not in KERNEL
            and mount.point != Path("/")
            and not any(mount.point.is_relative_to(own) for own in OWN)
            and not is_image(mount.point, image, mounts)
        }
    )


def _unescape(field: str) -> str:
    """Undo the octal escapes of blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
