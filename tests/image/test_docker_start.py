"""How the cpu image starts and ends: arguments, exit codes, signals, and a host that is hostile."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.docker import HARDENED, PLAIN, USER, Image

pytestmark = pytest.mark.image

PRINT = 'printf "%s|" "$@"'
WORDS = ("a b", "", "*", "it's", '"', "$HOME", "\\", "-x", "ü")


def test_arguments_arrive_as_they_are(cpu_image: Image) -> None:
    assert cpu_image.out("shell", "-c", PRINT, "shell", *WORDS) == "".join(f"{word}|" for word in WORDS)
    assert cpu_image.out("/bin/echo", *WORDS) == " ".join(WORDS) + "\n"


@pytest.mark.parametrize("options", [PLAIN, HARDENED], ids=["plain", "hardened"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["--version"], 0),
        (["fmengine", "--version"], 0),
        (["fmengine", "train", "--help"], 0),
        (["shell", "-c", "exit 7"], 7),
        (["/bin/false"], 1),
        (["trian"], 2),
        ([], 2),
        (["train", "--no-such-option"], 2),
        (["train", "no-such-recipe.yaml"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_codes(cpu_image: Image, options: tuple[str, ...], command: list[str], code: int) -> None:
    done = cpu_image.run(*command, options=options)
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_word_gets_help(cpu_image: Image) -> None:
    assert "train a model" in cpu_image.run("trian").stderr


def test_a_path_that_is_not_bound(cpu_image: Image) -> None:
    done = cpu_image.run("train", "/scratch/me/train.yaml")
    assert done.code == 2
    assert "-v /scratch:/scratch" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_hostile_host(cpu_image: Image, inputs: Path, owned: Path, tmp_path: Path) -> None:
    """A broken torch in PYTHONPATH, another numpy in ~/.local, LD_PRELOAD, conda, a full TMPDIR."""
    hostile = tmp_path / "hostile"
    packages = hostile / "home/.local/lib/python3.11/site-packages"
    for module in (hostile / "packages/torch", packages / "numpy", packages / "deepspeed"):
        module.mkdir(parents=True)
        (module / "__init__.py").write_text("raise SystemExit('the host got in')\n")
    library = hostile / "preloaded.so"
    shutil.copy(next(Path("/lib").glob("*-linux-gnu/libz.so.1")), library)
    variables = {
        "PYTHONPATH": "/hostile/packages",
        "PYTHONHOME": "/hostile",
        "PYTHONSTARTUP": "/hostile/start.py",
        "LD_PRELOAD": "/hostile/preloaded.so",
        "LD_LIBRARY_PATH": "/hostile",
        "HOME": "/hostile/home",
        "CONDA_PREFIX": "/hostile/conda",
        "TMPDIR": "/full",
        "HF_HOME": "/nowhere/huggingface",
    }
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    options += [*HARDENED, "--tmpfs", "/full:size=64k", "--workdir", "/data", "--volume", f"{hostile}:/hostile:ro"]
    options += ["--volume", f"{inputs}:/data:ro", "--volume", f"{owned}:/out"]
    done = cpu_image.run("train", "train.yaml", "--set", "run.dir=/out/run", options=options)
    assert done.code == 0, done.stderr
    assert (owned / "run/checkpoints/step-00000004/COMPLETE").exists()
    cut = next(line for line in done.stderr.splitlines() if "left out, as it is the host's" in line)
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "CONDA_PREFIX"):
        assert f"{name}={variables[name]}" in cut
    assert "/hostile/home/.local/lib/python3.11/site-packages" in cut
    assert "TMPDIR=/full" in done.stderr
    assert cpu_image.run("doctor", "--image", options=options).code == 0


def test_no_place_to_write(cpu_image: Image) -> None:
    options = ["--read-only", "--network", "none", "--user", f"{USER}:{USER}", "--shm-size", "1m"]
    done = cpu_image.run("train", options=options)
    assert done.code == 2
    assert "--tmpfs /tmp" in done.stderr


def test_docker_stop_reaches_the_trainer(cpu_image: Image, inputs: Path, owned: Path) -> None:
    """SIGTERM ends it at once, with the code that shells have for it. A checkpoint is not written on it, today."""
    options = [*HARDENED, "--workdir", "/data", "--volume", f"{inputs}:/data:ro", "--volume", f"{owned}:/out"]
    command = ["train", "train.yaml", "--set", "run.dir=/out/run", "--set", "train.steps=1000000"]
    with cpu_image.started(*command, "--set", "checkpoint.interval=1000000", options=options) as name:
        wait_for(owned / "run/metrics.jsonl", cpu_image, name)
        cpu_image.docker.out("stop", "--time", "60", name)
        state = cpu_image.docker.inspect(name)["State"]
    assert state["ExitCode"] == 128 + 15, "137 would be SIGKILL, after the 60 seconds"


def test_docker_stop_reaches_all_processes_of_a_run(cpu_image: Image, inputs: Path, owned: Path) -> None:
    options = [*HARDENED, "--shm-size", "1g", "--workdir", "/data"]
    options += ["--volume", f"{inputs}:/data:ro", "--volume", f"{owned}:/out"]
    command = ["train", "train.yaml", "--set", "run.dir=/out/run", "--set", "train.steps=1000000", "--workers", "2"]
    with cpu_image.started(*command, options=options) as name:
        wait_for(owned / "run/metrics.jsonl", cpu_image, name)
        cpu_image.docker.out("stop", "--time", "60", name)
        state = cpu_image.docker.inspect(name)["State"]
    assert state["ExitCode"] not in (0, 128 + 9)


def wait_for(file: Path, image: Image, name: str) -> None:
    """Until a file has a line; the container's log is followed meanwhile, so that its end is seen."""
    follow = subprocess.Popen(
        ["docker", "logs", "--follow", name], env=dict(image.docker.environ), stdout=-1, stderr=-2
    )
    with follow:
        assert follow.stdout
        for _ in follow.stdout:
            if file.exists() and file.read_text().count("\n"):
                follow.kill()
                return
    raise AssertionError(f"the container ended: {image.docker('logs', name)}")


def test_process_1_reaps(cpu_image: Image) -> None:
    """A process whose parent has died becomes process 1's child; it is gone once it has ended, and no zombie."""
    orphan = "(sleep 0 & echo $! >/tmp/orphan) & wait; read pid </tmp/orphan"
    wait = "for i in $(seq 600); do [ -d /proc/$pid ] || exit 0; sleep 0.1; done; cat /proc/$pid/status; exit 1"
    cpu_image.out("shell", "-c", f"{orphan}; {wait}", options=HARDENED)


def test_the_default_user_is_not_root(cpu_image: Image) -> None:
    assert cpu_image.out("shell", "-c", "id -u").strip() == "1000"
