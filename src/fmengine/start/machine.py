"""What the start needs to know about the machine, as a plain value; tests make their own."""

import os
import platform
import pwd
import re
import site
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fmengine.start.elf import needed_glibc
from fmengine.start.mounts import MOUNTINFO, Mount, parse

HOST_LIBRARIES = "FMENGINE_HOST_LIBRARIES"
"""Variable that a site profile sets: folders of libraries that it binds in on purpose, separated by colons."""

NV_LIBRARIES = Path("/.singularity.d/libs")
"""Where Apptainer's --nv binds the driver's libraries."""

CACHES = "FMENGINE_CACHES"
"""Variable that the start sets for its child processes: the job's folder."""

DRIVER_VERSION = Path("/proc/driver/nvidia/version")

DRIVER_FOLDERS = tuple(
    map(
        Path,
        (
            "/.singularity.d/libs",
            "/usr/local/nvidia/lib64",
            "/usr/local/nvidia/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib/wsl/lib",
        ),
    )
)
"""Where runtimes put libcuda.so.1."""

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4")
"""What CUDA loads of them; --nv binds many more, for graphics."""


def _free_bytes(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


@dataclass(frozen=True)
class Machine:
    """The process and the machine, as far as the start looks.

    Attributes:
        prefix: folder of the image's Python environment.
        python: version of the interpreter, as (3, 13).
        ignores_environment: whether Python was told not to read PYTHON* variables (-I or -E).
        uses_user_site: whether packages of ~/.local can be imported.
        process: a name that no other process of this node has.
        user: name of this user; None where the user id has none.
        shared_memory: size of /dev/shm in bytes; None where there is none.
        gpu_devices: NVIDIA's device files.
        has_libcuda: whether the driver's library is here.
        driver: version of NVIDIA's kernel driver, as "580.65.06".
        glibc: version of the C library, as (2, 41).
        host_libraries: libraries of the host that will be loaded, with the glibc that each needs.
        mounts: from /proc/self/mountinfo.
        free_bytes: room in a folder.
    """

    prefix: Path
    cwd: Path
    python: tuple[int, int] = (3, 13)
    ignores_environment: bool = True
    uses_user_site: bool = False
    uid: int = 1000
    process: str = "1"
    user: str | None = None
    architecture: str = "x86_64"
    shared_memory: int | None = None
    gpu_devices: int = 0
    has_libcuda: bool = False
    driver: str | None = None
    glibc: tuple[int, int] = (2, 41)
    host_libraries: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    free_bytes: Callable[[Path], int] = _free_bytes


def look(environ: Mapping[str, str]) -> Machine:
    """Describe this machine; no process is started and nothing is imported, so that it takes milliseconds."""
    user_site = site.ENABLE_USER_SITE and site.getusersitepackages() in sys.path
    return Machine(
        prefix=Path(sys.prefix),
        cwd=_cwd(),
        python=sys.version_info[:2],
        ignores_environment=bool(sys.flags.ignore_environment),
        uses_user_site=bool(user_site),
        uid=os.getuid(),
        process=_process(),
        user=_user(),
        architecture=platform.machine(),
        shared_memory=_size(Path("/dev/shm")),
        gpu_devices=_gpu_devices(Path("/dev")),
        has_libcuda=any((folder / "libcuda.so.1").exists() for folder in _library_folders(environ)),
        driver=parse_driver(_read(DRIVER_VERSION)),
        glibc=_glibc(),
        host_libraries=_host_libraries(environ),
        mounts=parse(_read(MOUNTINFO)),
    )


def parse_driver(text: str) -> str | None:
    """The version in /proc/driver/nvidia/version, of the proprietary and of the open kernel module."""
    match = re.search(r"^NVRM version:.*?Kernel Module\D*?(?:for \S+)?\s+(\d+\.[\d.]+)", text, re.MULTILINE)
    return match[1] if match else None


def exists(path: Path) -> bool:
    """Whether a path is there; not where one may not look, or the name is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def folders(value: str) -> list[Path]:
    """The folders in a list separated by colons."""
    return [Path(entry) for entry in value.split(":") if entry]


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # removed, or not bound
        return Path("/")


def _process() -> str:
    """Containers that share a folder number their processes alike: the number's name space makes it unique."""
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino}-{os.getpid()}"
    except OSError:
        return str(os.getpid())


def _user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _size(folder: Path) -> int | None:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return None
    return usage.f_blocks * usage.f_frsize


def _gpu_devices(devices: Path) -> int:
    if (devices / "dxg").exists():  # Windows Subsystem for Linux: one device for all
        return 1
    return sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in devices.iterdir())


def _library_folders(environ: Mapping[str, str]) -> list[Path]:
    return [*folders(environ.get("LD_LIBRARY_PATH", "")), *DRIVER_FOLDERS]


def _glibc() -> tuple[int, int]:
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0.0").split()[-1].split(".")
    return int(version[0]), int(version[1])


def _host_libraries(environ: Mapping[str, str]) -> dict[Path, tuple[int, int]]:
    libraries = [NV_LIBRARIES / name for name in DRIVER_LIBRARIES]
    for folder in folders(environ.get(HOST_LIBRARIES, "")):
        libraries += sorted(folder.glob("*.so*"))
    return {library: needed for library in libraries if (needed := needed_glibc(library))}


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
