import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from fmengine.doctor import rows
from fmengine.doctor.rows import Row, probe_command, run_probe, run_probes

CRASH = "import os, signal; os.kill(os.getpid(), signal.{})"


def python(code: str) -> dict[str, Any]:
    return run_probe([sys.executable, "-c", code], os.environ, 60)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (CRASH.format("SIGILL"), "killed by SIGILL: compiled for another kind of processor"),
        (CRASH.format("SIGSEGV"), "killed by SIGSEGV"),
        ("import sys; sys.exit('no')", "ended with exit code 1: no"),
        ("print('no json')", "ended with exit code 0"),
        ("", "ended with exit code 0"),
        ('print(\'{"state": "ok"}\'); import sys; sys.exit(3)', "ended with exit code 3"),
    ],
)
def test_whatever_happens_is_a_row(code: str, detail: str) -> None:
    assert python(code) == {"state": "fails", "detail": detail}


def test_the_last_line_counts() -> None:
    assert python('print("chatter"); print(\'{"state": "ok"}\')') == {"state": "ok"}


def test_one_that_hangs() -> None:
    found = run_probe(["tail", "-f", "/dev/null"], os.environ, 0.1)
    assert found["state"] == "fails"
    assert "did not end in" in found["detail"]


def test_one_crash_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(name: str) -> Sequence[str]:
        return [sys.executable, "-c", CRASH.format(name) if name == "SIGILL" else 'print(\'{"state": "ok"}\')']

    monkeypatch.setattr(rows, "probe_command", command)
    found = run_probes(["a", "SIGILL", "b"], os.environ)
    assert [*found] == ["a", "SIGILL", "b"]
    assert [result["state"] for result in found.values()] == ["ok", "fails", "ok"]


def test_the_environment_is_the_one_given() -> None:
    code = 'import os; print(\'{"state": "ok", "detail": "%s"}\' % os.environ[\'X\'])'
    assert run_probe([sys.executable, "-c", code], {"X": "7"}, 60)["detail"] == "7"


@pytest.mark.parametrize("name", ["python", "fmengine", "tokenizers", "numpy", "pydantic", "ruamel.yaml", "rich"])
def test_real_probes(name: str) -> None:
    found = run_probe(probe_command(name), os.environ, 120)
    assert (found["state"], found["where"]) == ("ok", "cpu"), found
    assert found["version"]


def test_what_is_wrong() -> None:
    assert Row("x", "absent", True).wrong
    assert Row("x", "fails", True).wrong
    assert not Row("x", "ok", True).wrong
    assert not Row("x", "fails", False).wrong
