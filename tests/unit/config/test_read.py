from pathlib import Path

import pytest

from fmengine.config.read import read, read_text, read_value
from fmengine.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-3.", -3.0),
        ("12", 12),
        ("+7", 7),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = read_value(text)
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    document = read_text("# first\na:\n  b: 1\n\n  c: [x, y]\nd:\n  - 5\n  - e: 6\n", "f")
    assert document.data == {"a": {"b": 1, "c": ["x", "y"]}, "d": [5, {"e": 6}]}
    assert document.lines == {
        (): 2,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c"): 5,
        ("a", "c", 0): 5,
        ("a", "c", 1): 5,
        ("d",): 6,
        ("d", 0): 7,
        ("d", 1): 8,
        ("d", 1, "e"): 8,
    }


def test_a_duplicate_keeps_the_first_and_names_both_lines() -> None:
    document = read_text("a:\n  b: 1\n  b: {c: 2, c: 3}\n  d: 4\na: 5\n", "f")
    assert document.data == {"a": {"b": 1, "d": 4}}
    assert [(found.key, found.line) for found in document.problems] == [(("a", "b"), 3), (("a",), 5)]
    assert "first in line 2" in document.problems[0].text


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: 1\nb: c: d\n", "f:2: not YAML: mapping values"),
        ("a: 1\nb: 'x\n", "f:3: not YAML"),
        ("a:\n\t- b\n", "f:2: not YAML"),
        ("a: \x00\n", "f: not YAML: unacceptable character #x0000"),
        ("a: &x 1\nb: *x\n", "f:2: aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "f:1: tags"),
        ("a: !!int '1'\n", "f:1: tags"),
        ("a: 1\n---\nb: 2\n", "f:2: a second document"),
        ("? [a]\n: 1\n", "f:1: a key must be a word"),
        ("{{a}}: 1\n", "f:1: a key must be a word"),
        ("a: " + "[" * 50, "f:1: nested deeper"),
        ("a: " + "9" * 5000, "f:1: a number of 5000 digits"),
    ],
)
def test_what_is_not_a_config_is_one_line(text: str, start: str) -> None:
    with pytest.raises(UserError) as caught:
        read_text(text, "f")
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(start)


def test_aliases_cannot_multiply() -> None:
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    with pytest.raises(UserError, match="aliases"):
        read_text("\n".join(rows), "f")


def test_bytes_that_are_not_utf_8_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(UserError, match=r"f\.yaml:2: byte 0xe9 is not UTF-8"):
        read(file)


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    assert read(file).data == {"a": 1}


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


def test_a_value_that_is_not_yaml() -> None:
    with pytest.raises(ValueError, match="not YAML"):
        read_value("[1")
    with pytest.raises(ValueError, match="a is given twice"):
        read_value("{a: 1, a: 2}")
