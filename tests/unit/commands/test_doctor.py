import json

import pytest

from fmengine import cli
from fmengine.cli import main
from fmengine.commands.doctor import table
from fmengine.doctor import examine
from fmengine.doctor.rows import Row

GOOD = Row("torch", "ok", True, "2.13.0", "cpu", "built for the CPU")
SPARE = Row("flash-attn", "absent", False, detail="flash-attn is not installed")
BAD = Row("numpy", "fails", True, detail="killed by SIGILL", advice="pip install numpy")


def put(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    monkeypatch.setattr(examine, "component_rows", lambda environ: [*rows])
    monkeypatch.setattr(cli.os, "environ", {"HOME": "/tmp", "CUDA_VISIBLE_DEVICES": ""})


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, GOOD, SPARE)
    assert main(["doctor", "--image"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "component   state     version  ran on",
        "torch       ok        2.13.0   cpu     built for the CPU",
        "flash-attn  (absent)  -        -       flash-attn is not installed",
        "",
        "no image: all that is needed is there",
    ]


def test_something_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, GOOD, BAD)
    assert main(["doctor", "--image"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["numpy: fails, killed by SIGILL; pip install numpy", "no image: 1 of 2 rows are wrong"]


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, GOOD, BAD)
    assert main(["doctor", "--json", "--image"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["variant"], found["ok"]) == (None, False)
    assert [row["name"] for row in found["rows"]] == ["torch", "numpy"]
    assert found["rows"][1]["advice"] == "pip install numpy"


def test_the_machine_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, GOOD)
    assert main(["doctor", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert names == ["torch", "gpu", "host libraries", "/dev/shm", "TMPDIR", "HOME"]


def test_columns_are_as_wide_as_their_widest() -> None:
    lines = table([GOOD, SPARE])
    assert {line.index("ok") for line in lines[1:2]} == {lines[0].index("state")}
