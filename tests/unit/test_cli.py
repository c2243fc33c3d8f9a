import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fmengine import __version__, cli
from fmengine.cli import COMMANDS, main
from fmengine.commands import train
from fmengine.errors import UserError
from fmengine.launch.local import worker_environ
from support.configs import MODEL, write_config

COSTLY = ("torch", "pydantic", "ruamel", "rich", "transformers", "deepspeed", "numpy", "tokenizers")


def python(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["validate", "--help"]])
def test_help_imports_nothing_costly(arguments: list[str]) -> None:
    code = f"""
import sys
from fmengine.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
print([name for name in {COSTLY!r} if name in sys.modules])
"""
    done = python(code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_names_every_command_and_what_is_written_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)
    assert "examples:" in text
    assert "RUN/checkpoints/step-00000100/" in text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fmengine {__version__}\n"


def test_no_command_is_help_and_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nope"], ["train", "--world-size", "0"], ["validate", "--world-size", "0"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2


def command(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    """Put a command in place of `env` that returns or raises `outcome`."""

    def run(args: argparse.Namespace, environ: dict[str, str]) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome(environ) if callable(outcome) else outcome

    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)


def test_a_users_mistakes_are_a_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, UserError(["a.yaml:1: x", "a.yaml:2: y"]))
    assert main(["env"]) == 2
    assert capsys.readouterr() == ("", "fmengine: error: a.yaml:1: x\nfmengine: error: a.yaml:2: y\n")


def test_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("ours"), BrokenPipeError("of some socket")):
        command(monkeypatch, error)
        with pytest.raises(type(error)):
            main(["env"])


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, KeyboardInterrupt())
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "fmengine: interrupted\n"
    command(monkeypatch, 75)
    assert main(["env"]) == 75


def test_a_command_gets_the_environment_as_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMENGINE_TEST", "7")
    command(monkeypatch, lambda environ: int(environ["FMENGINE_TEST"]))
    assert main(["env"]) == 7


def test_output_that_nobody_reads_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from fmengine.cli import main; sys.exit(main(['schema']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_module_runs_as_the_program_does() -> None:
    done = subprocess.run([sys.executable, "-m", "fmengine", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fmengine {__version__}\n"


RANKS = {
    *("rank", "local_rank", "world_size", "local_world_size", "node_rank", "num_nodes"),
    *("device", "master_addr", "master_port", "source", "reason"),
}


def env(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **environ: str) -> dict[str, Any]:
    monkeypatch.setattr(cli.os, "environ", {"CUDA_VISIBLE_DEVICES": "", **environ})
    assert main(["env", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_env_outside_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = env(monkeypatch, capsys)
    assert set(found) == RANKS
    assert (found["rank"], found["source"], found["device"]) == (None, "local", "cpu")


def test_env_of_a_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = env(monkeypatch, capsys, **names, MASTER_ADDR="127.0.0.1", MASTER_PORT="2345")
    assert set(found) == RANKS
    assert (found["rank"], found["world_size"], found["source"], found["master_port"]) == (1, 2, "torchrun", 2345)


def test_env_for_a_person(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
    assert main(["env"]) == 0
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == RANKS


def test_env_of_a_half_set_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.os, "environ", {"CUDA_VISIBLE_DEVICES": "", "RANK": "0"})
    assert main(["env", "--json"]) == 2
    assert capsys.readouterr().err.startswith("fmengine: error: LOCAL_RANK: not set, though RANK=0 is")


def test_validate_says_what_the_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{MODEL}batch: {{global_batch_size: 12, micro_batch_size: 3}}\nrun: {{dir: {tmp_path}}}\n"
    text += "parallel: {pipeline_parallel_size: 2}\ntrain: {steps: 10, precision: fp32}\n"
    assert main(["validate", str(write_config(tmp_path, text)), "--world-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "llama, 196,928 parameters, 2 layers, hidden size 64, vocabulary 512" in out
    assert "world size 4 = data 2 x sequence 1 x tensor 1 x pipeline 2, ZeRO-1, fp32" in out
    assert "12 global = 3 micro x 2 accumulation x 2 data; 24,576 tokens a step" in out
    assert "10 steps, 245,760 tokens" in out
    assert "3.15 MB at most, 2 kept" in out
    assert "33% of the time idle: 2 micro-batches fill 2 stages" in out
    assert out.endswith("train.yaml: no mistakes found\n")


def test_validate_with_five_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MODEL + "optimizer:\n  lrr: 1e-4\ntrain:\n  steps: -1\n  steps: 2\n  precision: int8\nmodle: 3\n"
    file = write_config(tmp_path, text)
    assert main(["validate", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    places = [":".join(line.removeprefix(f"fmengine: error: {file}:").split(":")[:2]) for line in lines]
    assert places == [
        "8: optimizer.lrr",
        "10: train.steps",
        "11: train.steps",
        "12: train.precision",
        "13: modle",
    ]


def test_validate_what_only_a_world_size_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{MODEL}batch:\n  global_batch_size: 12\nrun: {{dir: {tmp_path}}}\n"
    file = write_config(tmp_path, text)
    assert main(["validate", str(file), "--world-size", "12"]) == 0
    assert main(["validate", str(file), "--world-size", "5"]) == 2
    assert f"{file}:8: batch.global_batch_size: 12 is not divisible by 5" in capsys.readouterr().err


def test_validate_takes_set_and_writes_nothing(tmp_path: Path) -> None:
    sets = ["--set", f"run.dir={tmp_path / 'runs'}", "--set", "model.family=neox"]
    assert main(["validate", *sets, "--world-size", "2"]) == 0
    assert [*tmp_path.iterdir()] == []


def test_the_schema_knows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"version", "run", "model", "data", "deepspeed"}
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["OptimizerConfig"]["properties"]["learning_rate"]["exclusiveMinimum"] == 0
    sections = [body for name, body in schema["$defs"].items() if name.endswith("Config")]
    assert all("description" in key for section in sections for key in section["properties"].values())


def test_a_local_worker_takes_its_parents_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.os, "environ", {"CUDA_VISIBLE_DEVICES": "", **worker_environ({}, 1, 2, 2345)})
    monkeypatch.setattr(train, "_work", lambda args, ranks: ranks.rank)
    assert main(["train", "--workers", "2"]) == 1
    assert main(["train", "--workers", "3"]) == 2
    assert "--workers 3: this process is rank 1 of a run already (torchrun)" in capsys.readouterr().err
