"""Probes of what is not a Python package: interpreter, compilers, RDMA's libraries."""

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from fmengine.doctor.found import AbsentError, Found, program

RDMA = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1")
"""What NCCL's InfiniBand transport loads, and the provider of NVIDIA's adapters."""


def python() -> Found:
    """The interpreter, and whether the host's packages can get in."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else platform.libc_ver()[1]
    return Found(platform.python_version(), "cpu", f"{sys.prefix}, {libc}, {platform.machine()}")


def fmengine() -> Found:
    """The package itself, and the files that belong to it."""
    import fmengine as package

    recipe = Path(package.__file__).parent / "recipes" / "default.yaml"
    return Found(package.__version__, "cpu", f"default recipe of {len(recipe.read_text())} characters")


def c_compiler() -> Found:
    """The C compiler that Triton starts: compiles and loads a library that uses Python's headers, as Triton's do."""
    import sysconfig

    compiler = os.environ.get("CC") or program("gcc", "clang", "cc")
    source = "#include <Python.h>\nint answer(void) { return PY_MAJOR_VERSION; }\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.c"
        file.write_text(source)
        include = sysconfig.get_path("include")
        command = [compiler, "-shared", "-fPIC", f"-I{include}", str(file), "-o", str(file.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} does not compile: {_last(done.stderr)}")
        assert ctypes.CDLL(str(file.with_suffix(".so"))).answer() == sys.version_info.major
    version = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True)
    return Found(version.stdout.strip(), "cpu", compiler)


def ninja() -> Found:
    """The build tool, for an op that is not prebuilt."""
    try:
        version = metadata.version("ninja")
    except metadata.PackageNotFoundError as error:
        raise AbsentError(f"{error.name} is not installed") from error
    path = next((str(file) for file in [Path(sys.prefix) / "bin" / "ninja"] if file.exists()), None)
    done = subprocess.run([path or program("ninja"), "--version"], capture_output=True, text=True, check=True)
    return Found(version, "cpu", done.stdout.strip())


def rdma_core() -> Found:
    """RDMA's user space; without it NCCL goes over TCP in silence."""
    libraries = {}
    for name in RDMA:
        try:
            libraries[name] = ctypes.CDLL(name)
        except OSError as error:
            raise AbsentError(str(error)) from error
    verbs = libraries[RDMA[0]]
    count = ctypes.c_int(0)
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if devices:
        verbs.ibv_free_device_list(ctypes.c_void_p(devices))
    return Found(_rdma_version(), "cpu", f"{count.value} RDMA devices")


def _rdma_version() -> str:
    """Debian's version of it, else the library's own."""
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", "libibverbs1"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")
