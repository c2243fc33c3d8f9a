"""FMENGINE_SITE: a user's own packages, beside the image's."""

import re
from dataclasses import dataclass
from pathlib import Path

from fmengine.start.machine import Machine

SITE = "FMENGINE_SITE"

IMAGES_OWN = ("torch", "triton", "deepspeed", "fmengine")
"""Packages that what the image compiled belongs to: another version of one cannot be used with it."""


@dataclass(frozen=True)
class Site:
    """Folder to add to the end of Python's path, or what is wrong with it."""

    folder: Path | None = None
    problem: str | None = None


def read_site(value: str, machine: Machine) -> Site:
    """Check the folder that FMENGINE_SITE names.

    Args:
        value: a folder made by `pip install --target`, or by `pip install --prefix`.
        machine: for the image's Python.
    """
    top = Path(value)
    if not top.is_dir():
        return Site(problem=f"{SITE}={value}: no such folder in the container; bind it, or unset {SITE}")
    folder, problem = _packages(top, machine)
    if problem is None:
        problem = _replaced(folder) or _other_python(folder, machine)
    if problem:
        return Site(problem=f"{SITE}={value}: {problem}")
    return Site(folder=folder)


def _packages(top: Path, machine: Machine) -> tuple[Path, str | None]:
    """Where the packages lie: in the folder itself, or below lib/python3.N."""
    prefixes = sorted(top.glob("lib*/python3.*"))
    if not prefixes:
        return top, None
    wanted = "python{}.{}".format(*machine.python)
    for prefix in prefixes:
        if prefix.name == wanted:
            return prefix / "site-packages", None
    names = ", ".join(sorted({prefix.name.removeprefix("python") for prefix in prefixes}))
    return (
        top,
        f"installed for Python {names}, and the image has {_dotted(machine)}; install it with the image's python",
    )


def _replaced(folder: Path) -> str | None:
    for name in IMAGES_OWN:
        for info in folder.glob(f"{name}-*.dist-info"):
            version = info.name.removesuffix(".dist-info").partition("-")[2]
            return (
                f"has {name} {version}, and what the image compiled needs its own; install the packages again with "
                "the image's python and pip install --no-deps"
            )
    return None


def _other_python(folder: Path, machine: Machine) -> str | None:
    """A package for another Python: its wheel's tag, or the name of a compiled module, says so."""
    own = "{}{}".format(*machine.python)
    for wheel in sorted(folder.glob("*.dist-info/WHEEL")):
        tags = re.findall(r"^Tag:\s*(\S+)", wheel.read_text(errors="replace"), re.MULTILINE)
        if tags and not any(_fits(tag, machine) for tag in tags):
            name = wheel.parent.name.removesuffix(".dist-info").replace("-", " ", 1)
            return f"{name} was installed for {tags[0]}, and the image has Python {_dotted(machine)}; install it again"
    for module in sorted([*folder.glob("*.cpython-*.so"), *folder.glob("*/*.cpython-*.so")]):
        match = re.search(r"\.cpython-(\d+)", module.name)
        if match and match[1] != own:
            return f"{module.relative_to(folder)} is not for the image's Python {_dotted(machine)}; install it again"
    return None


def _fits(tag: str, machine: Machine) -> bool:
    """Whether a wheel's tag, such as cp313-cp313-manylinux_2_28_x86_64, is for this Python and machine.

    Source: https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/
    """
    python, abi, platform = tag.split("-", 2)
    major, minor = machine.python
    if platform != "any" and not platform.endswith(machine.architecture):
        return False
    if python == f"cp{major}{minor}":
        return True
    older = re.fullmatch(rf"cp{major}(\d+)", python)
    if older and abi == "abi3":
        return int(older[1]) <= minor
    return python in (f"py{major}", f"py{major}{minor}")


def _dotted(machine: Machine) -> str:
    return ".".join(map(str, machine.python))
