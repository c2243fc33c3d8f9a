"""The glibc that a shared library asks for, from its version needs.

Source of the structures: "Symbol Versioning" in the Linux Standard Base,
https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html
"""

import re
import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian: every machine that we have an image for."""

SHT_GNU_VERNEED = 0x6FFFFFFE
SECTION = struct.Struct("<IIQQQQIIQQ")


def needed_glibc(library: Path) -> tuple[int, int] | None:
    """Oldest glibc that a library loads with; None where it is no library of ours, or needs none.

    Reads the section headers and two sections, not the file.
    """
    try:
        with library.open("rb") as file:
            names = _version_names(file)
    except (OSError, struct.error, ValueError):
        return None
    versions = [(int(match[1]), int(match[2])) for name in names if (match := re.match(rb"GLIBC_(\d+)\.(\d+)", name))]
    return max(versions, default=None)


def _version_names(file: BinaryIO) -> list[bytes]:
    header = file.read(64)
    if not header.startswith(MAGIC):
        return []
    (offset,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    file.seek(offset)
    table = file.read(size * count)
    sections = [SECTION.unpack_from(table, index * size) for index in range(count)]
    for _, kind, _, _, start, length, link, entries, _, _ in sections:
        if kind == SHT_GNU_VERNEED:
            needs, strings = _read(file, start, length), _read(file, *sections[link][4:6])
            return _walk(needs, strings, entries)
    return []


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _walk(needs: bytes, strings: bytes, entries: int) -> list[bytes]:
    """The names in a chain of Verneed records, each with a chain of Vernaux records."""
    names, place = [], 0
    for _ in range(entries):
        _, count, _, first, following = struct.unpack_from("<HHIII", needs, place)
        aux = place + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", needs, aux)
            names.append(strings[name : strings.index(b"\0", name)])
            aux += step
        place += following
    return names
