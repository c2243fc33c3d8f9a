"""The table of variants holds: every locked package can be had, by hash, for every platform of its variant. Offline."""

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement as Pep508
from packaging.utils import canonicalize_name

from support.locks import CONTAINERS, LOCKS, ROOT, Requirement, fits, machine_tags, read_files, read_lock, read_versions


@dataclass(frozen=True)
class Variant:
    """A row of the table. `locks`: what pip installs, of which `build` stays in the build stage."""

    name: str
    base: str
    glibc_minor: int  # of the base: wheels may need up to glibc 2.N
    platforms: tuple[str, ...]
    python: str
    torch: str
    locks: tuple[str, ...]


TABLE = (
    Variant("cuda13", "debian:trixie-", 41, ("amd64", "arm64"), "3.13", "2.11.0", ("cuda13", "cuda13-source")),
    Variant("cuda12", "debian:trixie-", 41, ("amd64",), "3.13", "2.10.0", ("cuda12", "cuda12-source")),
    Variant("cpu", "debian:bookworm-", 36, ("amd64",), "3.11", "2.13.0+cpu", ("cpu", "cpu-torch")),
)
BY_NAME = {variant.name: variant for variant in TABLE}
PARTS = [(variant, lock) for variant in TABLE for lock in (*variant.locks, f"{variant.name}-build")]
PARTS_IDS = [lock for _, lock in PARTS]

# Packages of which PyPI has a source distribution only: the build stage compiles them.
SOURCE_ONLY = {"deepspeed", "flash-attn"}
# (lock, platform, package) that cannot be had, or is not wanted there, with the reason. Today there is none.
UNAVAILABLE: dict[tuple[str, str, str], str] = {}
# The variants' versions agree, but for torch and what follows from torch's choice.
MAY_DIFFER = re.compile(r"torch|triton|setuptools|cuda-.*|nvidia-.*")
COMPILERS = {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"}
COMMITTED = sorted(p for p in [*LOCKS.iterdir(), CONTAINERS / "versions.env"] if p.is_file())


def runtime(variant: Variant) -> dict[str, Requirement]:
    """All that is in the image."""
    return {name: found for lock in variant.locks for name, found in read_lock(LOCKS / f"{lock}.txt").items()}


@pytest.mark.parametrize(("variant", "lock"), PARTS, ids=PARTS_IDS)
def test_every_requirement_has_a_file_for_every_platform(variant: Variant, lock: str) -> None:
    files, missing = read_files(), []
    requirements = read_lock(LOCKS / f"{lock}.txt")
    assert requirements
    for platform in variant.platforms:
        tags = machine_tags(variant.python, platform, variant.glibc_minor)
        for requirement in requirements.values():
            known = files[requirement.name][requirement.version]
            fitting = [file for file, sha in known.items() if sha in requirement.hashes and fits(file, tags)]
            if not fitting or not requirement.wanted(platform):
                missing.append((lock, platform, requirement.name))
    assert missing == [key for key in UNAVAILABLE if key[0] == lock]


@pytest.mark.parametrize(("variant", "lock"), [p for p in PARTS if p[0].name != "cpu"], ids=PARTS_IDS[:6])
def test_cuda_lock_admits_no_other_file(variant: Variant, lock: str) -> None:
    """Each hash is a known file that some platform takes; the developer's cpu locks admit any machine's."""
    files = read_files()
    tags = [machine_tags(variant.python, platform, variant.glibc_minor) for platform in variant.platforms]
    for requirement in read_lock(LOCKS / f"{lock}.txt").values():
        known = {sha: file for file, sha in files[requirement.name][requirement.version].items()}
        assert requirement.hashes <= known.keys(), requirement.name
        for sha in requirement.hashes:
            assert any(fits(known[sha], of_platform) for of_platform in tags), known[sha]


@pytest.mark.parametrize("variant", TABLE, ids=list(BY_NAME))
def test_only_what_is_compiled_comes_as_source(variant: Variant) -> None:
    files = read_files()
    for name, requirement in runtime(variant).items():
        wheels = [file for file in files[name][requirement.version] if file.endswith(".whl")]
        assert bool(wheels) == (name not in SOURCE_ONLY), name
    if variant.name != "cpu":
        assert read_lock(LOCKS / f"{variant.name}-source.txt").keys() == SOURCE_ONLY & runtime(variant).keys()


@pytest.mark.parametrize("variant", TABLE, ids=list(BY_NAME))
def test_table_is_that_of_versions_env(variant: Variant) -> None:
    versions, key = read_versions(), variant.name.upper()
    base = versions[versions[f"{key}_BASE"]]
    assert re.fullmatch(re.escape(variant.base) + r"\d{8}-slim@sha256:[0-9a-f]{64}", base)
    assert versions[f"{key}_PLATFORMS"].split(",") == list(variant.platforms)
    assert versions[f"{key}_PYTHON"] == variant.python
    assert versions[f"{key}_TORCH"] == variant.torch == runtime(variant)["torch"].version


@pytest.mark.parametrize("variant", TABLE, ids=list(BY_NAME))
def test_lock_is_within_pyproject(variant: Variant) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = runtime(variant)
    for text in project["dependencies"]:
        asked = Pep508(text)
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)].version), text


@pytest.mark.parametrize("variant", [BY_NAME["cuda13"], BY_NAME["cuda12"]], ids=["cuda13", "cuda12"])
def test_lock_is_within_its_inputs(variant: Variant) -> None:
    locked = runtime(variant) | read_lock(LOCKS / f"{variant.name}-build.txt")
    for name in (variant.name, f"{variant.name}-build"):
        lines = (LOCKS / f"{name}.in").read_text().splitlines()
        for asked in [Pep508(line) for line in lines if line and not line.startswith("#")]:
            assert asked.specifier.contains(locked[asked.name].version), asked


def test_variants_agree_on_versions() -> None:
    seen: dict[str, str] = {}
    for variant in TABLE:
        for name, requirement in (runtime(variant) | read_lock(LOCKS / f"{variant.name}-build.txt")).items():
            if not MAY_DIFFER.fullmatch(name):
                assert seen.setdefault(name, requirement.version) == requirement.version, name
    assert {"deepspeed", "transformers", "numpy", "wheel"} <= seen.keys()


def test_compiler_stays_in_the_build_stage() -> None:
    build = read_lock(LOCKS / "cuda13-build.txt")
    assert build.keys() >= COMPILERS
    # One release of the compiler: its parts refuse each other's output otherwise.
    assert {build[name].version.rsplit(".", 1)[0] for name in COMPILERS} == {read_versions()["CUDA13_CUDA"]}
    for variant in TABLE:
        both = runtime(variant).keys() & read_lock(LOCKS / f"{variant.name}-build.txt").keys()
        assert not both
        assert not COMPILERS & runtime(variant).keys()


@pytest.mark.parametrize(("variant", "suffix"), [("cuda13", ""), ("cuda12", "-cu12")])
def test_cuda_runtime_is_of_the_variant_s_release(variant: str, suffix: str) -> None:
    """The wheel of torch asks for exactly the CUDA it was built with."""
    version = runtime(BY_NAME[variant])[f"nvidia-cuda-runtime{suffix}"].version
    assert version.startswith(read_versions()[f"{variant.upper()}_CUDA"] + ".")


def test_compiled_architectures_are_in_torch_s_wheel() -> None:
    versions = read_versions()
    assert set(versions["CUDA13_CUDA_ARCHITECTURES"].split(",")) <= set(
        versions["CUDA13_WHEEL_ARCHITECTURES"].split(",")
    )
    assert "7.0" in versions["CUDA12_WHEEL_ARCHITECTURES"].split(",")


def test_pins_outside_python() -> None:
    versions = read_versions()
    for key in ("APEX_COMMIT", "APEX_TREE", "APEX_SUBMODULE_COMMIT"):
        assert re.fullmatch("[0-9a-f]{40}", versions[key]), key
    assert versions["FLASH_ATTN"] == runtime(BY_NAME["cuda13"])["flash-attn"].version
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH_VERSION := {versions['CPU_TORCH'].removesuffix('+cpu')}\n" in makefile


def test_developer_s_tools_are_apart() -> None:
    tools = read_lock(LOCKS / "dev.txt")
    assert {"pytest", "ruff", "mypy", "pip-tools"} <= tools.keys()
    assert not tools.keys() & (runtime(BY_NAME["cpu"]).keys() | read_lock(LOCKS / "cpu-build.txt").keys())


def test_files_json_has_nothing_stale() -> None:
    locked = [read_lock(LOCKS / f"{lock}.txt") for lock in PARTS_IDS]
    used = {(r.name, r.version) for requirements in locked for r in requirements.values()}
    assert used == {(name, version) for name, found in read_files().items() for version in found}


@pytest.mark.parametrize("path", COMMITTED, ids=[path.name for path in COMMITTED])
def test_no_index_address_nor_path_of_a_machine(path: Path) -> None:
    """Any site's mirror will do, so no file names one. Prose may name public projects, without a scheme."""
    text = path.read_text()
    for pattern in (
        r"https?:",
        r"file:",
        r"--(extra-)?index-url",
        r"--find-links",
        r"--trusted-host",
        r"/(tmp|root|home|opt)/",
    ):
        assert not re.search(pattern, text), pattern
    if path.suffix in {".txt", ".in", ".json"}:
        assert not re.search(r"\w\.(org|com|net|io|dev)\b", text)


def test_split_finds_versions_that_differ(tmp_path: Path) -> None:
    """`make lock` compiles twice; what runs must be what is developed with."""
    requirement = "numpy=={} \\\n    --hash=sha256:" + "0" * 64 + "\n"
    (tmp_path / "all.txt").write_text(requirement.format("2.4.6"))
    (tmp_path / "runtime.txt").write_text(requirement.format("2.4.5"))
    done = subprocess.run(
        [sys.executable, LOCKS / "lock.py", "split", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "versions" in done.stderr
