from pathlib import Path

import pytest

from fmengine.start.mounts import bound, is_image, mount_of, parse
from support.machines import APPTAINER, DOCKER, PREFIX, UNDERLAY


def test_an_escaped_name_is_read() -> None:
    assert Path("/p/project x") in {mount.point for mount in parse(APPTAINER)}


def test_lines_of_another_form_are_left_out() -> None:
    assert parse("nonsense\n1 2 3\n\n36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw\n") == (
        parse("36 35 98:0 /mnt1 /mnt2 rw - ext3 /dev/root rw")[0],
    )


def test_the_longest_and_latest_mount_counts() -> None:
    mounts = parse("1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /home rw - ext4 a rw\n3 1 0:3 / /home rw - nfs b rw\n")
    found = mount_of(Path("/home/me"), mounts)
    assert found is not None
    assert found.device == "0:3"
    assert mount_of(Path("/homes"), mounts) == mounts[0]
    assert mount_of(Path("/x"), ()) is None


@pytest.mark.parametrize(
    ("text", "path", "own"),
    [
        (APPTAINER, "/usr/lib/x", True),
        (APPTAINER, "/home/me/lib", False),
        (APPTAINER, "/home", True),
        (UNDERLAY, "/usr/lib/x", True),
        (UNDERLAY, "/scratch", True),
        (UNDERLAY, "/home/me/lib", False),
        (DOCKER, "/workspace", False),
        (DOCKER, "/opt/fmengine/lib", True),
    ],
)
def test_what_is_the_images(text: str, path: str, own: bool) -> None:
    assert is_image(Path(path), PREFIX, parse(text)) is own


def test_what_is_bound() -> None:
    assert bound(PREFIX, parse(APPTAINER)) == [Path("/home/me"), Path("/p/project x"), Path("/tmp")]
    assert bound(PREFIX, parse(UNDERLAY)) == [Path("/home/me")]
    assert bound(PREFIX, parse(DOCKER)) == [Path("/workspace")]
    assert bound(PREFIX, ()) == []
