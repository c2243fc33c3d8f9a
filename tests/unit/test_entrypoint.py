"""The entrypoint with a stand-in for `fmengine`, which prints its arguments in brackets and its process id."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "entrypoints"
ENTRYPOINT, COMMAND = FOLDER / "entrypoint.sh", FOLDER / "fmengine.sh"

STUB = '#!/bin/sh\nprintf \'%s:\' "$$"\nprintf \'<%s>\' "$0" "$@"\nexit 7\n'
ODD = ["a b", "", "'", '"', "$HOME", "*", "x=\ny", "--", "-n", "\\"]


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    for name in ("fmengine", "python"):
        program(tmp_path / name)
    return tmp_path


def program(file: Path) -> Path:
    file.write_text(STUB)
    file.chmod(0o755)
    return file


def run(stubs: Path, *arguments: str, script: Path = ENTRYPOINT) -> tuple[int, bool, str]:
    """Exit code, whether it is the same process, what the stand-in got."""
    environ = {"PATH": f"{stubs}:/usr/bin:/bin", "FMENGINE_PYTHON": f"{stubs}/python"}
    process = subprocess.Popen([script, *arguments], stdout=subprocess.PIPE, text=True, env=environ)
    out, _ = process.communicate()
    pid, _, words = out.partition(":")
    return process.returncode, pid == str(process.pid), words


def words(*arguments: str) -> str:
    return "".join(f"<{argument}>" for argument in arguments)


@pytest.mark.parametrize("command", ["train", "prepare", "doctor", "env", "an-unknown-word", "--help", "-x"])
def test_a_word_is_fmengines(stubs: Path, command: str) -> None:
    """`env` and `--help` are no programs; an unknown word gets fmengine's help and exit code 2."""
    assert run(stubs, command, *ODD) == (7, True, words(f"{stubs}/fmengine", command, *ODD))


def test_fmengine_itself(stubs: Path) -> None:
    assert run(stubs, "fmengine", "train", *ODD) == (7, True, words(f"{stubs}/fmengine", "train", *ODD))


def test_nothing_at_all(stubs: Path) -> None:
    assert run(stubs) == (7, True, words(f"{stubs}/fmengine"))
    assert run(stubs, "") == (7, True, words(f"{stubs}/fmengine", ""))


def test_a_program_by_its_path(stubs: Path, tmp_path: Path) -> None:
    path = str(program(tmp_path / "a program"))
    assert run(stubs, path, *ODD) == (7, True, words(path, *ODD))


def test_a_path_that_is_no_program(stubs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for path in (str(tmp_path / "config.yaml"), str(tmp_path), "/none/x"):
        assert run(stubs, path, "x") == (7, True, words(f"{stubs}/fmengine", path, "x"))


def test_an_unknown_word_gets_help() -> None:
    """Of the real command, which the entrypoint hands it to."""
    command = [sys.executable, "-m", "fmengine", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "examples:" in done.stderr
    assert "invalid choice: 'trian'" in done.stderr.splitlines()[-1]


def test_a_shell(stubs: Path) -> None:
    assert run(stubs, "shell", "-c", 'printf \'%s:%s\' "$$" "<$1>"; exit 5', "x", "a b") == (5, True, "<a b>")


def test_a_signal_arrives(stubs: Path) -> None:
    (stubs / "fmengine").write_text("#!/bin/sh\ntrap 'echo stopped; exit 9' TERM\necho ready\nread -r _\n")
    environ = {"PATH": f"{stubs}:/usr/bin:/bin"}
    with subprocess.Popen(
        [ENTRYPOINT, "train"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout.read() == "stopped\n"
    assert process.returncode == 9


def test_the_command_keeps_the_host_out_of_python(stubs: Path) -> None:
    assert run(stubs, *ODD, script=COMMAND) == (7, True, words(f"{stubs}/python", "-I", "-m", "fmengine", *ODD))


def test_they_are_programs() -> None:
    for script in (ENTRYPOINT, COMMAND):
        assert os.access(script, os.X_OK)
        assert script.read_text().startswith("#!/bin/sh\n")
