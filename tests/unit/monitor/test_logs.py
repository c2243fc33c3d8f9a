"""The log file of a rank has everything; the terminal has the run's lines and warnings only."""

import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from fmengine.errors import UserError
from fmengine.monitor.logs import header, log_file, logging_to

RUN = """
import logging, os, sys, warnings
from pathlib import Path
from fmengine.monitor.logs import header, logging_to
import torch
with logging_to(Path(sys.argv[1]), rank=3, world_size=8, header=header(["fmengine", "train", "a b.yaml"], None)) as out:
    print("printed chatter")
    os.write(1, b"chatter of C++\\n")
    warnings.warn("a warning of Python")
    logging.getLogger("torch.distributed").warning("chatter of torch")
    logging.getLogger("DeepSpeed").warning("chatter of DeepSpeed")
    logging.getLogger("DeepSpeed").error("an error of DeepSpeed")
    logging.getLogger("fmengine.x").info("our information")
    logging.getLogger("fmengine.x").warning("our warning")
    print("a line of the run", file=out)
    if len(sys.argv) > 2:
        raise RuntimeError("it broke")
print("after")
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *args], capture_output=True, text=True, check=False)


def test_what_goes_where(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.stdout == "a line of the run\nafter\n"
    assert done.stderr == "rank 3: ERROR an error of DeepSpeed\nrank 3: WARNING our warning\n"
    text = log_file(tmp_path, 3).read_text()
    for said in (
        "printed chatter",
        "chatter of C++",
        "a warning of Python",
        "WARNING rank 3 torch.distributed: chatter of torch",
        "chatter of DeepSpeed",
        "an error of DeepSpeed",
        "INFO rank 3 fmengine.x: our information",
        "our warning",
    ):
        assert text.count(said + "\n") == 1, said
    assert "a line of the run" not in text
    assert "torch 2" in text
    assert "command fmengine train 'a b.yaml'" in text
    assert datetime.fromisoformat(text.split()[0]).utcoffset() is not None


def test_a_traceback_is_in_the_file_and_once_on_standard_error(tmp_path: Path) -> None:
    done = run(str(tmp_path), "break")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: it broke") == 1
    assert log_file(tmp_path, 3).read_text().count("RuntimeError: it broke") == 1


def test_everything_is_put_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    library = logging.getLogger("library-with-a-handler")
    library.addHandler(handler := logging.NullHandler())
    for _ in range(2):
        with logging_to(tmp_path, rank=0, world_size=1):
            assert library.handlers == []
    assert (list(root.handlers), root.level) == before
    assert library.handlers == [handler]
    os.write(1, b"to the terminal again")
    assert capfd.readouterr().out == "to the terminal again"


def test_a_second_run_appends(tmp_path: Path) -> None:
    for _ in range(2):
        with logging_to(tmp_path, rank=0, world_size=1, header=header(["fmengine"], Path("a.yaml"))):
            pass
    assert log_file(tmp_path, 0).read_text().count("command fmengine\n") == 2


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"run\.dir: cannot write the log .*rank-0000\.log"),
        logging_to(tmp_path / "file", rank=0, world_size=1),
    ):
        pass
