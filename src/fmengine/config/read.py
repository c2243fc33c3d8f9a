"""YAML 1.2 in, plain data and the line of every key out.

The events of ruamel.yaml's parser are read here directly, because its constructors stop at the first
duplicate key, forget where a value stood, and know tags and aliases that a config has no use for.
Scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `1e-4` is a
number, `no` is a word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from fmengine.config.source import KeyPath, Problem, dotted
from fmengine.errors import UserError

MAX_DEPTH = 32
"""Deepest nesting read; a real config has four levels."""

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass
class Document:
    """What a file says.

    Attributes:
        data: mappings, lists and scalars as plain Python values; every key is a string.
        lines: 1-based line of every key and list item; the empty path is the document itself.
        problems: mistakes that do not stop the reading, such as a duplicate key, at its second line.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or is not YAML; with file:line where there is one.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8 text"
        ) from None
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Document:
    """Read YAML text; `name` stands before the line number in errors.

    Raises:
        UserError: not YAML, or something in it that a config may not use (aliases, tags, several documents).
    """
    try:
        return _parse(text)
    except _RefusedError as refused:
        line = "" if refused.line is None else f":{refused.line}"
        raise UserError(f"{name}{line}: {refused}") from None


def read_value(text: str) -> Any:
    """One value as it would stand after `key: ` in a file.

    Raises:
        ValueError: not YAML; the message says why.
    """
    try:
        document = _parse(text)
    except _RefusedError as refused:
        raise ValueError(str(refused)) from None
    if document.problems:
        raise ValueError(f"{dotted(document.problems[0].key)} is given twice")
    return document.data


class _RefusedError(Exception):
    """Not YAML, or YAML that a config may not use, and its 1-based line."""

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(" ".join(text.split()))
        self.line = line


def _refused(text: str, event: Event) -> _RefusedError:
    return _RefusedError(text, event.start_mark.line + 1)


def _parse(text: str) -> Document:
    document = Document()
    try:
        # The pure parser is the one that knows YAML 1.2; libyaml's reads 1.1.
        events = iter(YAML(typ="safe", pure=True).parse(text))
        for event in events:
            if isinstance(event, DocumentStartEvent):
                if () in document.lines:
                    raise _refused("a second document starts here; a config is one document", event)
                document.lines[()] = event.start_mark.line + 1
                document.data = _value(next(events), events, (), document)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise _RefusedError(f"not YAML: {error.problem or error.context}", line) from None
    except YAMLError as error:
        raise _RefusedError(f"not YAML: {error}", None) from None
    return document


def _value(event: Event, events: Iterator[Event], path: KeyPath, document: Document) -> Any:
    """The value that starts with `event`; takes its events up to its end."""
    if len(path) > MAX_DEPTH:
        raise _refused(f"nested deeper than {MAX_DEPTH} levels", event)
    if isinstance(event, AliasEvent):
        raise _refused("aliases (*name) are not read here; write the value out", event)
    if getattr(event, "ctag", None) is not None:
        raise _refused("tags (!name) are not read here; write a plain value", event)
    if isinstance(event, MappingStartEvent):
        return _mapping(events, path, document)
    if isinstance(event, SequenceStartEvent):
        return _sequence(events, path, document)
    assert isinstance(event, ScalarEvent)
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in event.value):
        raise _refused("a NUL or half a surrogate pair, which no name or path here may hold", event)
    return event.value if event.style else _plain(event)


def _mapping(events: Iterator[Event], path: KeyPath, document: Document) -> dict[str, Any]:
    result: dict[str, Any] = {}
    while not isinstance(event := next(events), MappingEndEvent):
        if not isinstance(event, ScalarEvent):
            raise _refused("a key must be a word", event)
        key, line = str(event.value), event.start_mark.line + 1
        here = (*path, key)
        if key in result:
            first = document.lines[here]
            document.problems.append(Problem(here, f"given twice, first in line {first}; keep one", line))
            # The first stays; the second is read for its end alone.
            _value(next(events), events, here, Document())
            continue
        document.lines[here] = line
        result[key] = _value(next(events), events, here, document)
    return result


def _sequence(events: Iterator[Event], path: KeyPath, document: Document) -> list[Any]:
    result: list[Any] = []
    while not isinstance(event := next(events), SequenceEndEvent):
        here = (*path, len(result))
        document.lines[here] = event.start_mark.line + 1
        result.append(_value(event, events, here, document))
    return result


def _plain(event: ScalarEvent) -> str | int | float | bool | None:
    """An unquoted scalar by YAML 1.2's core schema."""
    text: str = event.value
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 30:  # Python itself refuses to read thousands of digits.
            raise _refused(f"a number of {len(text)} digits", event)
        return int(text)
    if _BASED_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text
