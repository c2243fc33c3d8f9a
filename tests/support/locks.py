"""The locks of the images, read back: requirements, hashes, and which file fits which machine."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
LOCKS = CONTAINERS / "locks"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Requirement:
    """A line of a lock with its hashes; `marker` is empty where every platform takes it."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]

    def wanted(self, platform: str) -> bool:
        """Whether pip installs it there."""
        return not self.marker or f'platform_machine == "{MACHINES[platform]}"' in self.marker


def read_lock(path: Path) -> dict[str, Requirement]:
    """A lock's requirements by name.

    Raises:
        ValueError: a line that is neither a comment nor a pinned requirement with hashes.
    """
    text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==(\S+)(?: ; (.*?))?((?: --hash=sha256:[0-9a-f]{64})+)", line)
        if not match or match[1] in found:
            raise ValueError(
                f"{path.name}: {line[:80]!r} is no requirement with a version and hashes, or is there twice"
            )
        hashes = frozenset(re.findall("[0-9a-f]{64}", match[4]))
        found[match[1]] = Requirement(match[1], match[2], match[3] or "", hashes)
    return found


def read_versions(path: Path = CONTAINERS / "versions.env") -> dict[str, str]:
    """versions.env.

    Raises:
        ValueError: a line that a shell, make and Python would not read alike, or a key that is there twice.
    """
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Z][A-Z0-9_]*)=([A-Za-z0-9.,:@/+_-]+)", line)
        if not match or match[1] in found:
            raise ValueError(f"{path.name}: {line!r} is not KEY=VALUE, or its key is there twice")
        found[match[1]] = match[2]
    return found


def read_files() -> dict[str, dict[str, dict[str, str]]]:
    """files.json: package -> version -> file name -> sha256."""
    files: dict[str, dict[str, dict[str, str]]] = json.loads((LOCKS / "files.json").read_text())
    return files


def machine_tags(python: str, platform: str, glibc_minor: int) -> frozenset[Tag]:
    """The wheel tags that CPython `python` takes on Linux with glibc 2.`glibc_minor`."""
    version = tuple(int(part) for part in python.split("."))
    machine = MACHINES[platform]
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc_minor, 4, -1)]
    names += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    interpreter = f"cp{version[0]}{version[1]}"
    return frozenset({*cpython_tags(version, platforms=names), *compatible_tags(version, interpreter, names)})


def fits(file: str, tags: frozenset[Tag]) -> bool:
    """Whether pip can install a file there: a wheel of these tags, or any source distribution."""
    return not file.endswith(".whl") or bool(parse_wheel_filename(file)[3] & tags)
