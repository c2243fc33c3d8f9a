"""The cpu image at work, in plain Docker and as any user, with a read-only root and no network."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.docker import HARDENED, PLAIN, USER, Image, copy_distributions
from support.locks import ROOT

pytestmark = pytest.mark.image

WAYS = pytest.mark.parametrize("way", [(*PLAIN, "--user", f"{USER}:{USER}"), HARDENED], ids=["plain", "hardened"])
SMOKE = ("tests/unit/models", "tests/unit/kernels", "tests/unit/config", "tests/parity/test_transformers.py")
PYTEST = ("pytest", "pluggy", "iniconfig", "hypothesis", "sortedcontainers")


def steps(run: Path) -> list[int]:
    """The training steps that a run's metrics have."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["kind"] == "train"]


def bind(source: Path, target: str, *, writable: bool = False) -> list[str]:
    return ["--volume", f"{source}:{target}{'' if writable else ':ro'}"]


@WAYS
def test_the_default_model_trains(cpu_image: Image, owned: Path, way: Sequence[str]) -> None:
    few = ["train.steps=3", "schedule.warmup_steps=1", "train.eval_samples=8", "train.eval_interval=3"]
    sets = [word for setting in few for word in ("--set", setting)]
    done = cpu_image.run("train", *sets, options=[*way, *bind(owned, "/workspace", writable=True)])
    assert done.code == 0, done.stderr + done.stdout
    run = owned / "runs" / "default"
    assert steps(run) == [1, 2, 3]
    assert (run / "checkpoints" / "step-00000003" / "COMPLETE").exists()
    assert {path.stat().st_uid for path in run.rglob("*")} == {USER}
    assert {path.name for path in owned.iterdir()} == {"runs"}, "nothing else is written where one works"


@WAYS
def test_the_doctor_finds_the_image_whole(cpu_image: Image, way: Sequence[str]) -> None:
    done = cpu_image.run("doctor", "--image", "--json", options=way)
    found = json.loads(done.stdout)
    assert found["variant"] == "cpu"
    assert [row for row in found["rows"] if row["expected"] and row["state"] != "ok"] == []
    assert done.code == 0


@WAYS
def test_the_doctor_finds_the_machine_fit(cpu_image: Image, way: Sequence[str]) -> None:
    done = cpu_image.run("doctor", options=way)
    assert done.code == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "image cpu: all that is needed is there"


@WAYS
def test_a_smoke_subset_of_the_tests_passes_inside(cpu_image: Image, tmp_path: Path, way: Sequence[str]) -> None:
    site = tmp_path / "site"
    copy_distributions(PYTEST, site)
    options = [*way, *bind(ROOT / "tests", "/project/tests"), *bind(ROOT / "pyproject.toml", "/project/pyproject.toml")]
    options += [*bind(site, "/site"), "--env", "PYTHONPATH=/site:/project/tests", "--env", "OMP_NUM_THREADS=1"]
    options += ["--env", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis", "--env", "HOME=/tmp", "--workdir", "/project"]
    program = ["/opt/fmengine/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    done = cpu_image.run(*program, *SMOKE, options=options)
    assert done.code == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout.splitlines()[-1]


@WAYS
def test_config_data_and_output_come_from_elsewhere(
    cpu_image: Image, inputs: Path, owned: Path, way: Sequence[str]
) -> None:
    options = [
        *way,
        *bind(inputs / "train.yaml", "/cfg/train.yaml"),
        *bind(inputs, "/data"),
        *bind(owned, "/out", writable=True),
    ]
    places = ["data.train=/data/data", "data.tokenizer=/data/tokenizer", "run.dir=/out/my run"]
    sets = [word for place in places for word in ("--set", place)]
    assert cpu_image.run("train", "/cfg/train.yaml", *sets, options=options).code == 0
    run = owned / "my run"
    assert steps(run) == [1, 2, 3, 4]
    again = cpu_image.run("train", "/cfg/train.yaml", *sets, "--set", "train.steps=6", options=options)
    assert again.code == 0, again.stderr
    assert steps(run) == [1, 2, 3, 4, 5, 6], "a second container goes on where the first ended"


def test_two_processes_in_a_container(cpu_image: Image, inputs: Path, owned: Path) -> None:
    options = [*HARDENED, "--shm-size", "1g", *bind(inputs, "/data"), *bind(owned, "/out", writable=True)]
    where = ["--set", "run.dir=/out/run"]
    done = cpu_image.run("train", "train.yaml", *where, "--workers", "2", options=[*options, "--workdir", "/data"])
    assert done.code == 0, done.stderr
    assert {path.name for path in (owned / "run" / "logs").iterdir()} == {"rank-0000.log", "rank-0001.log"}


def test_two_containers_share_a_node(cpu_image: Image, inputs: Path, owned: Path) -> None:
    """With the node's network and its /tmp, as jobs of one user on a node have."""
    temporary = owned / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    way = [*PLAIN, "--user", f"{USER}:{USER}", "--workdir", "/data", *bind(inputs, "/data")]
    options = [*way, *bind(owned, "/out", writable=True), *bind(temporary, "/tmp", writable=True)]
    commands = [["train", "train.yaml", "--set", f"run.dir=/out/{name}"] for name in ("one", "two")]
    with (
        cpu_image.started(*commands[0], options=options) as one,
        cpu_image.started(*commands[1], options=options) as two,
    ):
        codes = cpu_image.docker.out("wait", one, two).split()
        logs = [cpu_image.docker(*("logs", name)) for name in (one, two)]
    assert codes == ["0", "0"], logs
    assert [steps(owned / name) for name in ("one", "two")] == [[1, 2, 3, 4]] * 2
    assert list(temporary.iterdir()) == [], "what a container put on the node is gone with it"
