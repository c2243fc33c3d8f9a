import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fmengine.data import default
from fmengine.data.default import DefaultData, prepare_default
from fmengine.data.tokens import TokenReader, bin_path
from fmengine.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DefaultData:
    """The default corpus, made of one file in ten so that it is quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "_source_files", some_files)
        return prepare_default(tmp_path_factory.mktemp("default") / "data", 2048)


whole_list = default._source_files


def some_files(root: Path) -> list[Path]:
    return whole_list(root)[::10]


@pytest.fixture(autouse=True)
def fewer_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_source_files", some_files)


def test_text_comes_back_from_the_tokens(made: DefaultData) -> None:
    reader = TokenReader(made.prefix)
    tokenizer = AutoTokenizer.from_pretrained(made.tokenizer)
    texts = tokenizer.decode(reader.tokens(0, reader.document_start(3)).tolist()).split("<|endoftext|>")
    root = Path(os.__file__).parent
    assert texts == [file.read_text("utf-8") for file in some_files(root)[:3]] + [""]
    assert reader.num_documents > 40
    assert len(tokenizer) == 2048


def test_it_is_made_once(made: DefaultData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_make", lambda *_: pytest.fail("made again"))
    assert prepare_default(made.prefix.parent.parent, 2048) == made


def test_a_damaged_one_is_made_again(made: DefaultData, tmp_path: Path) -> None:
    shutil.copytree(made.prefix.parent, tmp_path / made.prefix.parent.name)
    whole = bin_path(made.prefix).read_bytes()
    bin_path(tmp_path / made.prefix.parent.name / "train").write_bytes(whole[:-100])
    again = prepare_default(tmp_path, 2048)
    assert bin_path(again.prefix).read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [made.prefix.parent.name]


def test_the_corpus_has_no_other_packages_and_no_tests() -> None:
    files = whole_list(Path(os.__file__).parent)
    parts = {part for file in files for part in file.parts}
    assert not parts & {"site-packages", "test", "__pycache__"}
    assert sum(file.stat().st_size for file in files) > 5_000_000
    names = [file.name for file in files]
    assert names != sorted(names)


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="at least 2048"):
        prepare_default(tmp_path, 1000)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: File exists|Not a directory"):
        prepare_default(tmp_path / "file" / "data", 2048)
    monkeypatch.setattr(default, "_source_files", lambda root: [])
    with pytest.raises(UserError, match="no source of the standard library"):
        prepare_default(tmp_path, 2048)
