"""The cpu SIF at work: as root and as a user with no subordinate ids, through `apptainer run` and `apptainer exec`."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sif import CLEAN, OFFLINE, WAYS, Container

pytestmark = pytest.mark.image

BOTH_WAYS = pytest.mark.parametrize("way", WAYS)
WORDS = ("a b", "", "*", "it's", '"', "$HOME", "`id`", "\\", "x=\ny", "-x", "--", "ü")
PRINT = 'printf "<%s>" "$@"'


def steps(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["kind"] == "train"]


def bind(*places: str) -> list[str]:
    return [word for place in places for word in ("--bind", place)]


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def output(container: Container) -> Path:
    """An empty folder of the user who starts the container, and a name with a blank in it."""
    folder = container.home / "out put"
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir()
    os.chown(folder, container.uid, container.uid)
    return folder


@pytest.mark.parametrize("container", ["root"], indirect=True)
def test_every_file_is_roots_and_none_a_device(container: Container) -> None:
    """Who has no subordinate ids could else not unpack it."""
    find = [
        "find",
        "/usr",
        "/opt",
        "/etc/apt",
        "/var",
        "(",
        "!",
        "-user",
        "0",
        "-o",
        "!",
        "-group",
        "0",
        "-o",
        "-type",
        "b",
    ]
    found = container.execute(*find, "-o", "-type", "c", ")", options=["--contain"])
    assert (found.code, found.text) == (0, "")


def test_the_tests_of_the_definition_pass(container: Container) -> None:
    done = container.apptainer("test", container.sif)
    assert done.code == 0, done.text
    assert "image cpu: all that is needed is there" in done.text


def test_the_definition_says_what_it_is(container: Container) -> None:
    assert "apptainer run" in container.apptainer("run-help", container.sif).text
    labels = container.apptainer("inspect", "--json", container.sif).text
    assert json.loads(labels[labels.index("{") :])["data"]["attributes"]["labels"]["fmengine.variant"] == "cpu"
    assert "usage: fmengine train" in container.run("--help", app="train").text
    assert "usage: fmengine doctor" in container.run("--help", app="doctor").text


def test_the_environment_is_the_images(container: Container) -> None:
    """The host's PATH, language and image name do not win."""
    host = container.environ | {"LC_ALL": "xx_XX", "LANG": "xx_XX", "FMENGINE_IMAGE": "other", "PYTHONNOUSERSITE": ""}
    shown = container.execute("/usr/bin/env", environ=host).text.splitlines()
    for line in ("LC_ALL=C.UTF-8", "LANG=C.UTF-8", "FMENGINE_IMAGE=cpu", "PYTHONNOUSERSITE=1"):
        assert line in shown
    path = next(line for line in shown if line.startswith("PATH="))
    assert path.startswith("PATH=/usr/local/sbin:/usr/local/bin:/opt/fmengine/bin:/usr/sbin")


def test_arguments_arrive_as_they_are(container: Container) -> None:
    """Not through spython, which leaves out empty ones."""
    expected = "".join(f"<{word}>" for word in WORDS)
    commands = [["run", "shell", "-c", PRINT, "shell"], ["run", "/usr/bin/printf", "<%s>"]]
    for verb, *command in [*commands, ["exec", "bash", "-c", PRINT, "shell"]]:
        assert container.apptainer("--quiet", verb, container.sif, *command, *WORDS).text == expected


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["--version"], 0),
        (["train", "--help"], 0),
        (["trian", "a b", ""], 2),
        ([], 2),
        (["train", "--no-such-option"], 2),
        (["train", "no such recipe.yaml"], 2),
        (["train", "/nowhere/at/all/train.yaml"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_run_and_exec_are_alike(container: Container, command: list[str], code: int) -> None:
    """In what is said and in the exit code."""
    run, execute = (container.fmengine(way, *command, options=CLEAN) for way in WAYS)
    assert run == execute
    assert run.code == code, run.text
    assert "Traceback" not in run.text


def test_exit_codes_of_programs(container: Container) -> None:
    assert container.run("shell", "-c", "exit 7").code == 7
    assert container.execute("sh", "-c", "exit 7").code == 7
    assert container.run("/bin/false").code == 1


def test_a_path_that_is_not_bound(container: Container, tmp_path: Path) -> None:
    done = container.run("train", "/srv/nowhere/train.yaml", options=CLEAN)
    assert done.code == 2
    assert "--bind /srv/nowhere" in done.text


def test_the_default_model_trains(container: Container, output: Path) -> None:
    few = sets(
        "train.steps=3", "schedule.warmup_steps=1", "train.eval_samples=8", "train.eval_interval=3", "run.dir=/out/run"
    )
    done = container.run("train", *few, options=[*CLEAN, *OFFLINE, *bind(f"{output}:/out")])
    assert done.code == 0, done.text
    assert steps(output / "run") == [1, 2, 3]
    assert (output / "run/checkpoints/step-00000003/COMPLETE").exists()
    assert {path.stat().st_uid for path in output.rglob("*")} == {container.uid}


@BOTH_WAYS
def test_config_data_and_output_come_from_elsewhere(container: Container, inputs: Path, output: Path, way: str) -> None:
    places = bind(f"{inputs}/train.yaml:/cfg/train.yaml:ro", f"{inputs}:/data:ro", f"{output}:/out")
    options = [*CLEAN, *OFFLINE, *places]
    where = sets("data.train=/data/data", "data.tokenizer=/data/tokenizer", "run.dir=/out/my run")
    done = container.fmengine(way, "train", "/cfg/train.yaml", *where, options=options)
    assert done.code == 0, done.text
    assert steps(output / "my run") == [1, 2, 3, 4]


@pytest.fixture
def hostile(container: Container) -> Iterator[dict[str, str]]:
    """An environment in which everything is the host's, with what it names: HOME is for whom has none, unset."""
    folder = container.home / "hostile"
    site = container.home / ".local/lib/python3.11/site-packages"
    for module in (folder / "packages/torch", site / "numpy", site / "deepspeed"):
        module.mkdir(parents=True)
        (module / "__init__.py").write_text("raise SystemExit('the host got in')\n")
    full = folder / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "none", full], check=True)
    yield {
        **container.environ,
        "PYTHONPATH": f"{folder}/packages",
        "PYTHONHOME": str(folder),
        "LD_PRELOAD": f"{folder}/preloaded.so",
        "CONDA_PREFIX": f"{folder}/conda",
        "TMPDIR": str(full),
        "HF_HOME": "/nowhere/huggingface",
    }
    subprocess.run(["umount", full], check=True)
    subprocess.run(["rm", "-rf", folder, container.home / ".local"], check=True)


@BOTH_WAYS
@pytest.mark.parametrize("home", ["home", "unset"])
def test_a_hostile_host(
    container: Container, hostile: dict[str, str], inputs: Path, output: Path, way: str, home: str
) -> None:
    if home == "unset":
        del hostile["HOME"]
    options = bind(f"{inputs}:/data:ro", f"{output}:/out", str(container.home), hostile["TMPDIR"])
    where = sets("data.train=/data/data", "data.tokenizer=/data/tokenizer", "run.dir=/out/run")
    command = ["train", "/data/train.yaml", *where]
    done = container.fmengine(way, *command, options=[*options, "--pwd", "/data"], environ=hostile)
    assert done.code == 0, done.text
    assert (output / "run/checkpoints/step-00000004/COMPLETE").exists()
    cut = next(line for line in done.text.splitlines() if "left out, as it is the host's" in line)
    for name in ("PYTHONPATH", "PYTHONHOME", "CONDA_PREFIX"):
        assert f"{name}={hostile[name]}" in cut
    assert f"TMPDIR={hostile['TMPDIR']} has less than" in done.text


@BOTH_WAYS
def test_a_sigterm_reaches_the_trainer(container: Container, inputs: Path, output: Path, way: str) -> None:
    """It ends at once, with the code that shells have for it. A checkpoint is not written on it, today."""
    places = bind(f"{inputs}:/data:ro", f"{output}:/out")
    where = sets("data.train=/data/data", "data.tokenizer=/data/tokenizer", "run.dir=/out/run")
    command = ["train", "/data/train.yaml", *where, *sets("train.steps=1000000", "checkpoint.interval=1000000")]
    words = [way, *CLEAN, *places, container.sif, *(["fmengine"] if way == "exec" else []), *command]
    metrics = output / "run/metrics.jsonl"
    with container.started(*words) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            if metrics.exists() and metrics.read_text():
                break
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not trainers(str(output))


def trainers(mark: str) -> list[str]:
    """Processes whose mounts have a folder."""
    found = []
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            text, words = table.read_text(), (table.parent / "cmdline").read_text()
        except OSError:
            continue
        if mark.replace(" ", "\\040") in text and "fmengine" in words:
            found.append(words)
    return found
