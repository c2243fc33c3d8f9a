import _ctypes
import re
from pathlib import Path

import pytest

from fmengine.start.elf import needed_glibc

LIBRARY = Path(_ctypes.__file__)


def versions(data: bytes) -> set[tuple[int, int]]:
    return {(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", data)}


def test_a_real_library() -> None:
    """Its strings have the same names; ours come from the structures."""
    assert needed_glibc(LIBRARY) == max(versions(LIBRARY.read_bytes()))


def test_a_newer_need_is_seen(tmp_path: Path) -> None:
    data = LIBRARY.read_bytes()
    name = b"\0GLIBC_2.%d\0" % max(versions(data))[1]
    assert name in data
    newer = tmp_path / "lib.so"
    newer.write_bytes(data.replace(name, name.replace(b"GLIBC_2.", b"GLIBC_9.")))
    needed = needed_glibc(newer)
    assert needed is not None
    assert needed[0] == 9


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x01\x01" + b"\0" * 99, b"#!/bin/sh\n" * 20, LIBRARY.read_bytes()[:4000]]
)
def test_no_library(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(data)
    assert needed_glibc(file) is None
    assert needed_glibc(tmp_path / "none") is None
