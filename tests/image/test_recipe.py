"""The Dockerfile and its notes agree with versions.env and with the scripts; nothing is built."""

import re

import pytest

from fmengine.start.variants import VARIANTS
from support.locks import CONTAINERS, ROOT, read_versions

DOCKERFILE = (ROOT / "Dockerfile").read_text()
VERSIONS = read_versions()


def test_every_image_comes_from_the_pinned_base() -> None:
    froms = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in froms}
    assert {source for source, _ in froms} - stages == {"scratch", "${BASE}", "system-${VARIANT}", "compile-${VARIANT}"}
    for variant in VARIANTS:
        assert {f"system-{variant}", f"compile-{variant}"} <= stages


def test_nothing_is_fetched_to_read_it() -> None:
    assert not re.search(r"^# *syntax *=", DOCKERFILE, re.MULTILINE), "BuildKit would ask a registry for its frontend"
    assert not re.search(r"https?://|\bcurl\b|\bwget\b|\bADD\b", DOCKERFILE)


def test_every_script_is_used_and_can_be_run() -> None:
    used = set(re.findall(r"source=containers/scripts/(\S+?),", DOCKERFILE))
    there = {path.name for path in (CONTAINERS / "scripts").iterdir() if path.is_file()}
    assert used == there
    for name in there - {"pip.sh", "sbom.py"}:  # read by a shell, and by Python
        assert (CONTAINERS / "scripts" / name).stat().st_mode & 0o111, name


def test_secrets_are_mounted_and_never_copied() -> None:
    for line in DOCKERFILE.splitlines():
        if re.search(r"ca\.crt|pip\.conf|apt\.conf|apt\.sources", line) and not line.startswith("#"):
            assert re.fullmatch(r" *(--mount=type=secret,id=[a-z.]+ ?)+\\", line), line


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_in_the_notes(variant: str) -> None:
    pinned, name = VARIANTS[variant], variant.upper()
    row = re.search(rf"^\| `{variant}` \|.*$", (CONTAINERS / "README.md").read_text(), re.MULTILINE)
    assert row
    _, _, purpose, base, platforms, torch, _, _ = (cell.strip() for cell in row[0].split("|"))
    assert base == f"Debian {VERSIONS[f'{name}_BASE'].lower()}"
    assert platforms == VERSIONS[f"{name}_PLATFORMS"].replace(",", ", ")
    kind = f"CUDA {VERSIONS[f'{name}_CUDA']}" if pinned.cuda else "CPU"
    assert torch == f"{VERSIONS[f'{name}_TORCH'].partition('+')[0]}, {kind}"
    if pinned.cuda:
        assert str(pinned.driver) in purpose
