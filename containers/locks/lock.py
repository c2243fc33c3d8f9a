"""Write the locks of the images. `make locks` calls it; it needs nothing but Python 3.11 and, for CUDA, uv.

    lock.py split FOLDER               FOLDER/{all,runtime}.txt, of pip-compile -> cpu.txt, cpu-build.txt, dev.txt
    lock.py images UV FOLDER [FLAG..]  cuda13*.txt, cuda12*.txt, cpu-torch.txt, files.json; FOLDER has scratch files
                                       and, in FOLDER/wheels, torch's CPU wheel

uv resolves for a platform that is not this machine's, from metadata alone: no large wheel is downloaded. Its own output
names every file by its address, so what is committed is written here: versions and hashes in the locks, file names in
files.json. A lock admits only the files that fit one of the variant's platforms, and a source distribution only where a
package has nothing else, so that pip can never fall back to building something that is on PyPI as a wheel.
"""

import hashlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parents[1] / "pyproject.toml"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
CPU_BUILD = {"wheel"}  # setuptools, which builds DeepSpeed too, is a dependency of torch

Pins = dict[str, str]  # package -> version
Files = dict[str, dict[str, str]]  # package -> file name -> sha256


def settings() -> Pins:
    """The keys of versions.env."""
    lines = (HERE.parent / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def blocks(text: str) -> dict[str, list[str]]:
    """A lock's requirements: package -> its lines, hashes and annotation included."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if not line:
            break  # what follows in pip-compile's output are its warnings
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            name = line.split("==")[0]
        found.setdefault(name, []).append(line)
    return found


def pins(name: str) -> Pins:
    """The versions in a committed lock; empty where there is none yet."""
    path = HERE / name
    text = path.read_text() if path.exists() else ""
    return {package: lines[0].split("==")[1].split()[0] for package, lines in blocks(text).items()}


def split(folder: Path) -> None:
    """Divide what pip-compile found into runtime, build stage and tools of the developer."""
    everything = blocks((folder / "all.txt").read_text())
    runtime = blocks((folder / "runtime.txt").read_text())
    if any(runtime[name][0] != everything[name][0] for name in runtime):
        sys.exit("error: the versions for running and for developing differ; run `make lock` again")
    parts = {
        "cpu": ("pyproject.toml. torch is not in it: its build differs", runtime),
        "cpu-build": ("pyproject.toml: what DeepSpeed's build needs besides", {n: everything[n] for n in CPU_BUILD}),
        "dev": (
            "pyproject.toml's extra 'dev'",
            {n: v for n, v in everything.items() if n not in {*runtime, *CPU_BUILD}},
        ),
    }
    for name, (source, found) in parts.items():
        lines = [line for package in sorted(found) for line in found[package]]
        (HERE / f"{name}.txt").write_text("\n".join([f"# Made by 'make lock' from {source}.", *lines]) + "\n")


class Resolver:
    """uv for one interpreter version and platform."""

    def __init__(self, uv: str, folder: Path, python: str, platform: str, flags: list[str]) -> None:
        self.folder, self.flags = folder, flags
        self.command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        self.command += ["--python-version", python, "--python-platform", f"{MACHINES[platform]}-manylinux_2_28"]

    def versions(self, inputs: list[Path], preferred: Pins, fixed: Pins) -> Pins:
        """Resolve requirements; versions in `preferred` stay where they fit, those in `fixed` must."""
        output, constraints = self.folder / "versions.txt", self.folder / "fixed.txt"
        output.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()))
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
        names = [str(path) for path in inputs]
        subprocess.run(
            [*self.command, *self.flags, "--constraint", str(constraints), "--output-file", str(output), *names],
            check=True,
        )
        return dict(line.split("==") for line in output.read_text().splitlines())

    def files(self, versions: Pins) -> Files:
        """The files of these versions that fit: wheels, or else the source distribution."""
        exact, output = self.folder / "exact.txt", self.folder / "pylock.toml"
        exact.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        output.unlink(missing_ok=True)
        format_ = ["--no-deps", "--format", "pylock.toml", "--output-file", str(output)]
        subprocess.run([*self.command, *format_, str(exact)], check=True)
        found: Files = {}
        for package in tomllib.loads(output.read_text())["packages"]:
            entries = package.get("wheels") or [package["sdist"]]
            found[package["name"]] = {
                unquote(entry["url"].rsplit("/", 1)[1]): entry["hashes"]["sha256"] for entry in entries
            }
        return found


def write(name: str, source: str, versions: Pins, files: Mapping[str, Files]) -> None:
    """A lock; `files` is platform -> Files. A package that one platform lacks carries a marker."""
    lines = [f"# Made by 'make locks' from {source}."]
    for package in sorted(versions):
        having = [platform for platform in files if package in files[platform]]
        markers = [f'platform_machine == "{MACHINES[platform]}"' for platform in having]
        marker = "" if len(having) == len(files) else f" ; {' or '.join(markers)}"
        hashes = sorted({sha for platform in having for sha in files[platform][package].values()})
        lines.append(f"{package}=={versions[package]}{marker} \\")
        lines += [f"    --hash=sha256:{sha}{' ' + chr(92) if sha != hashes[-1] else ''}" for sha in hashes]
    (HERE / f"{name}.txt").write_text("\n".join(lines) + "\n")


def merge(parts: list[Pins]) -> Pins:
    """One set of versions for all platforms.

    Raises:
        SystemExit: two platforms resolve to different versions.
    """
    merged: Pins = {}
    for part in parts:
        for name, version in part.items():
            if merged.setdefault(name, version) != version:
                sys.exit(
                    f"error: {name} is {merged[name]} on one platform and {version} on another: pin it in the .in file"
                )
    return merged


def lock_variant(variant: str, uv: str, folder: Path, flags: list[str]) -> tuple[Pins, list[Files]]:
    """Write the three locks of a CUDA variant; return its versions and files."""
    table = settings()
    platforms = table[f"{variant.upper()}_PLATFORMS"].split(",")
    preferred = pins("cpu.txt") | pins("cpu-build.txt")
    for part in ("", "-source", "-build"):
        preferred = pins(f"{variant}{part}.txt") | preferred  # CI tests with the cpu lock: its versions come first
    runtime, build, files = {}, {}, {}
    for platform in platforms:
        resolver = Resolver(uv, folder, table[f"{variant.upper()}_PYTHON"], platform, flags)
        runtime[platform] = resolver.versions([PYPROJECT, HERE / f"{variant}.in"], preferred, {})
        with_build = resolver.versions([HERE / f"{variant}-build.in"], preferred, runtime[platform])
        build[platform] = {name: value for name, value in with_build.items() if name not in runtime[platform]}
        files[platform] = resolver.files(runtime[platform] | build[platform])
    versions = merge(list(runtime.values()))
    sources = {name for part in files.values() for name in part if all(file.endswith(".tar.gz") for file in part[name])}
    inputs = f"pyproject.toml and {variant}.in"
    write(variant, inputs, {n: v for n, v in versions.items() if n not in sources}, files)
    write(
        f"{variant}-source", f"{inputs}: what is compiled", {n: v for n, v in versions.items() if n in sources}, files
    )
    write(f"{variant}-build", f"{variant}-build.in: what stays in the build stage", merge(list(build.values())), files)
    return versions | merge(list(build.values())), list(files.values())


def lock_cpu_torch(version: str, folder: Path) -> Files:
    """Write cpu-torch.txt, apart from cpu.txt, since machines with a GPU install another torch; return its file."""
    (wheel,) = (folder / "wheels").glob("torch-*.whl")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = {"torch": {wheel.name: sha}}
    write("cpu-torch", "the wheel of PyTorch's CPU builds", {"torch": version}, {"amd64": found})
    return found


def lock_images(uv: str, folder: Path, flags: list[str]) -> None:
    """Write the CUDA locks, cpu-torch.txt, and files.json for all variants."""
    table = settings()
    record: dict[str, dict[str, dict[str, str]]] = {}
    cpu = pins("cpu.txt") | pins("cpu-build.txt")
    found = [(cpu, [Resolver(uv, folder, table["CPU_PYTHON"], "amd64", []).files(cpu)])]
    found.append(({"torch": table["CPU_TORCH"]}, [lock_cpu_torch(table["CPU_TORCH"], folder)]))
    found += [lock_variant(variant, uv, folder, flags) for variant in ("cuda13", "cuda12")]
    for versions, parts in found:
        for files in parts:
            for name, entries in files.items():
                record.setdefault(name, {}).setdefault(versions[name], {}).update(entries)
    (HERE / "files.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["split", folder]:
            split(Path(folder))
        case ["images", uv, folder, *flags]:
            lock_images(uv, Path(folder), flags)
        case _:
            sys.exit(__doc__)
