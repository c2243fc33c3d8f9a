import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from fmengine.commands import prepare
from fmengine.data.tokenizer import save_tokenizer, train_bpe
from fmengine.data.tokens import TokenReader
from fmengine.errors import UserError


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]), {})


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    save_tokenizer(train_bpe(["some text"], 260), tmp_path / "tokenizer", "<|endoftext|>")
    return tmp_path / "tokenizer"


def test_it_says_what_it_made(tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n' + "oops\n" * 30)
    arguments = [tmp_path / "a.jsonl", "--tokenizer", tokenizer_dir, "--out", tmp_path / "d", "--workers", 1]
    assert run(*arguments, "--on-error", "skip") == 0
    shown = capsys.readouterr()
    expected = "1 documents, 4 tokens, 3 bytes of text; 30 bad and 1 empty rows left out"
    assert shown.out == f"{tmp_path / 'd'}: {expected}\n"
    assert shown.err.count("left out: ") == prepare.BAD_ROWS_SHOWN + 1
    assert f"{tmp_path}/a.jsonl:3: malformed JSON" in shown.err
    assert TokenReader(tmp_path / "d").num_documents == 1


def test_lines_of_progress_have_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = iter([0.0, 1.0, 11.0, 12.0]), list[str]()
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
    from fmengine.data.prepare import Progress

    show = prepare._Lines(lines.append)
    for _ in range(3):
        show.update(Progress(50, 200, 3, 110))
    assert lines == ["prepare: 25% | 3 documents | 110 tokens | 10/s"]


def test_the_bar_takes_progress_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    from fmengine.data.prepare import Progress

    with prepare._Bar() as bar:
        bar.print("left out: [bold]x:1: odd")
        bar.update(Progress(50, 200, 3, 110))
    shown = capsys.readouterr()
    assert "left out: [bold]x:1: odd" in shown.err
    assert "110 tokens" in shown.err
    assert shown.out == ""


def test_no_workers_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--workers: 0"):
        run(tmp_path / "a.jsonl", "--tokenizer", tmp_path, "--out", tmp_path / "d", "--workers", 0)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, fmengine.commands.prepare; print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["out.bin", "out.idx"])
def test_a_file_name_in_place_of_the_prefix_is_refused(tmp_path: Path, tokenizer_dir: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(UserError, match=rf"--out .*{name}: give the prefix of the two files, .*/out$"):
        run(tmp_path / "a.txt", "--tokenizer", tokenizer_dir, "--out", tmp_path / name, "--workers", 1)
