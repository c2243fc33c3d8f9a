from pathlib import Path
from typing import Any

import pytest

from fmengine.start.mounts import parse
from fmengine.start.paths import problems
from support.machines import APPTAINER, bound_at, machine

SIF = {"APPTAINER_CONTAINER": "/images/fmengine.sif"}
ALL_IMAGE = parse("1 0 0:1 / / ro - overlay overlay ro")


def lines(*arguments: str, environ: dict[str, str] | None = None, **values: Any) -> list[str]:
    return problems(["train", *arguments], environ or {}, machine(**values))


@pytest.mark.parametrize(
    "arguments",
    [
        ["/lustre-none/me/config.yaml"],
        ["--set", "data.train=/lustre-none/me/config.yaml"],
        ["--out=/lustre-none/me/config.yaml"],
        ["--tokenizer", "/lustre-none/me/config.yaml", "--out", "/lustre-none/me/config.yaml"],
    ],
)
def test_a_place_that_is_not_bound(arguments: list[str]) -> None:
    assert lines(*arguments) == [
        "/lustre-none/me/config.yaml is not in the container: bound are /workspace; add -v /lustre-none:/lustre-none"
    ]


def test_apptainers_words() -> None:
    (line,) = lines("/lustre-none/c.yaml", environ=SIF, mounts=parse(APPTAINER))
    assert line.endswith("bound are /home/me, /p/project x, /tmp; add --bind /lustre-none")
    assert "nothing of the host is bound" in lines("/lustre-none/c.yaml", mounts=ALL_IMAGE)[0]


def test_a_link_to_what_is_not_bound(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/lustre-none/project/data")
    (line,) = lines(f"{tmp_path}/data/train", environ=SIF, mounts=parse(APPTAINER))
    assert line.startswith(f"{tmp_path}/data/train (a link to /lustre-none/project/data/train) is not in the container")
    assert line.endswith("add --bind /lustre-none")


def test_a_folder_of_the_image_on_the_way(tmp_path: Path) -> None:
    """As /home, which the image has, empty."""
    (line,) = lines(f"{tmp_path}/me/c.yaml", mounts=ALL_IMAGE)
    assert line.endswith(f"add -v {tmp_path}/me:{tmp_path}/me")


def test_what_is_left_to_the_command(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").touch()
    assert lines(f"{tmp_path}/there.yaml", mounts=ALL_IMAGE) == []
    assert lines("--out", f"{tmp_path}/new", mounts=ALL_IMAGE) == []  # to be made
    assert lines(f"{tmp_path}/a/b/c", mounts=bound_at(tmp_path)) == []  # its place is bound
    assert lines("llama-3-8b", "--workers", "2", "-v", "--set", "a=b", mounts=ALL_IMAGE) == []


def test_text_is_no_path() -> None:
    assert lines("--prompt", "/lustre-none/x", "--prompt=/lustre-none/y", "--eod", "/z") == []


def test_links_in_a_circle_and_names_too_long(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert lines(f"{tmp_path}/a", mounts=ALL_IMAGE) == []
    assert len(lines("/" + "x" * 5000, mounts=ALL_IMAGE)) == 1  # it is not there either


def test_a_relative_file_where_the_current_folder_is_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = lines("config.yaml", cwd=tmp_path, mounts=ALL_IMAGE)
    assert line.startswith(
        f"config.yaml is not in {tmp_path}, a folder of the image: nothing of the host is bound; add -v"
    )
    assert lines("config.yaml", cwd=Path("/"), mounts=ALL_IMAGE)[0].endswith("add -v $PWD:/workspace -w /workspace")
    assert lines("config.yaml", cwd=Path("/"), environ=SIF, mounts=ALL_IMAGE)[0].endswith("add --bind $PWD --pwd $PWD")
    assert lines("config.yaml", cwd=tmp_path, mounts=bound_at(tmp_path)) == []  # the command says that it is not there
    (tmp_path / "config.yaml").touch()
    assert lines("config.yaml", cwd=tmp_path, mounts=ALL_IMAGE) == []
