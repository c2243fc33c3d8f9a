from pathlib import Path

import pytest

from fmengine.start.site import read_site
from support.machines import machine


def install(folder: Path, name: str, version: str, *tags: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n" + "".join(f"Tag: {tag}\n" for tag in tags))


@pytest.mark.parametrize(
    "tag",
    [
        "py3-none-any",
        "py2.py3-none-any",
        "py313-none-any",
        "cp313-cp313-manylinux_2_28_x86_64",
        "cp39-abi3-manylinux2014_x86_64",
        "py3-none-manylinux2014_x86_64",
    ],
)
def test_a_package_for_this_python(tmp_path: Path, tag: str) -> None:
    install(tmp_path, "x", "1", *([tag] if "." not in tag.split("-")[0] else ["py2-none-any", "py3-none-any"]))
    assert read_site(str(tmp_path), machine()).folder == tmp_path


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp313-cp313-manylinux_2_28_aarch64",
        "cp314-abi3-manylinux2014_x86_64",
        "py2-none-any",
    ],
)
def test_a_package_for_another(tmp_path: Path, tag: str) -> None:
    install(tmp_path, "wandb", "0.2", tag)
    problem = read_site(str(tmp_path), machine()).problem
    assert problem == (
        f"FMENGINE_SITE={tmp_path}: wandb 0.2 was installed for {tag}, and the image has Python 3.13; install it again"
    )


def test_a_compiled_module_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    module = tmp_path / "pkg" / "fast.cpython-312-x86_64-linux-gnu.so"
    module.touch()
    assert "pkg/fast.cpython-312" in (read_site(str(tmp_path), machine()).problem or "")
    assert read_site(str(tmp_path), machine(python=(3, 12))).problem is None


def test_torch_is_not_replaced(tmp_path: Path) -> None:
    install(tmp_path, "torch_geometric", "2.6", "py3-none-any")
    assert read_site(str(tmp_path), machine()).problem is None
    install(tmp_path, "torch", "2.9.0", "cp313-cp313-manylinux_2_28_x86_64")
    assert "has torch 2.9.0, and what the image compiled needs its own" in (
        read_site(str(tmp_path), machine()).problem or ""
    )


def test_a_prefix(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.13" / "site-packages"
    install(packages, "x", "1", "py3-none-any")
    assert read_site(str(tmp_path), machine()).folder == packages
    problem = read_site(str(tmp_path), machine(python=(3, 12))).problem
    assert "installed for Python 3.13, and the image has 3.12" in (problem or "")


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder in the container; bind it" in (read_site(f"{tmp_path}/x", machine()).problem or "")
