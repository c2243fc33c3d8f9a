"""A run folder that does not fit its config, or is damaged: refused in a line, or gone on from what is whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.faults import Attempt, Done, Stop, Zygote

MORE = ("train", "train.yaml", "--set", "train.steps=6")


def refused(done: Done, text: str) -> None:
    """Exit code 2; the one error line, behind any warnings, has the text in it."""
    assert done.code == 2, done.stderr
    *warnings, last = done.stderr.splitlines()
    assert last.startswith("fmengine: error: ")
    assert text in last
    assert all("passed over" in line for line in warnings), done.stderr


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("run.seed=5", "run.seed: 5, but run/checkpoints/step-00000004 was trained with 1234"),
        ("data.sequence_length=8", "data.sequence_length: 8, but run/checkpoints/step-00000004 was trained with 16"),
        ("batch.global_batch_size=8", "batch.global_batch_size: 8, but"),
        ("model.hidden_size=64", "checkpoint of another model: model.hidden_size is 32 there and 64 here"),
        ("model.rope_theta=5e5", "checkpoint of another model: model.rope_theta is 10000.0 there and 500000.0 here"),
        (
            "data.validation_fraction=0.3",
            "data: 57 samples in an epoch, but run/checkpoints/step-00000004 was trained with 78",
        ),
    ],
)
def test_a_config_that_the_run_cannot_go_on_with(zygote: Zygote, run: Path, change: str, text: str) -> None:
    before = checkpoints(run), (run / "config.yaml").read_bytes()
    refused(zygote.run(run.parent, *MORE, "--set", change), text)
    assert (checkpoints(run), (run / "config.yaml").read_bytes()) == before


def test_a_finished_run_says_so(zygote: Zygote, run: Path) -> None:
    for steps in (4, 3):
        done = zygote.run(run.parent, "train", "train.yaml", "--set", f"train.steps={steps}")
        assert (done.code, done.stderr) == (0, "")
        assert done.stdout == f"finished already: run/checkpoints/step-00000004 has 4 of {steps} steps\n"


def test_fresh_puts_the_old_checkpoints_and_their_metrics_aside(zygote: Zygote, run: Path) -> None:
    """Twice, which may be within one second."""
    for count in (1, 2):
        done = zygote.run(run.parent, "train", "train.yaml", "--fresh")
        assert done.code == 0, done.stderr
        assert "starting over: the older checkpoints are now in run/checkpoints-until-" in done.stderr
        aside = sorted(run.glob("checkpoints-until-*"))
        assert len(aside) == count
        for folder in [run / "checkpoints", *aside]:
            assert (folder / "step-00000004" / "COMPLETE").is_file()
        for rows in (run / "metrics.jsonl", *(folder / "metrics.jsonl" for folder in aside)):
            assert json.loads(rows.read_text().splitlines()[-1])["step"] == 4


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_passed_over_and_replaced(zygote: Zygote, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000004"
    state = max((newest / "engine" / "state").iterdir(), key=lambda path: path.stat().st_size)
    flip(state)
    for command in (("export", "run", "--out", "model"), ("generate", "run", "--prompt", "a")):
        refused(zygote.run(run.parent, *command), f"{state.name}: not what was written")
    assert not (run.parent / "model").exists()
    done = zygote.run(run.parent, *MORE)
    assert done.code == 0
    assert (
        f"WARNING passed over a broken checkpoint: run/checkpoints/step-00000004/engine/state/{state.name}: not what"
        in (done.stderr)
    )
    assert "going on from step 2" in done.stdout
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    done = zygote.run(run.parent, *MORE)  # from step 4, which is whole again
    assert (done.code, done.stderr) == (0, "")
    assert "going on from step 4" in done.stdout


def junk(*parts: str) -> Callable[[Path], None]:
    """A file that holds no sense, in place of whatever is there."""

    def damage(run: Path) -> None:
        path = run.joinpath(*parts)
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(b'\xff\n{}\n{"step": "x"}\n[1]\n')

    return damage


def folder(*parts: str) -> Callable[[Path], None]:
    """A folder in place of a file."""

    def damage(run: Path) -> None:
        path = run.joinpath(*parts)
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "x").touch()

    return damage


NEWEST = ("checkpoints", "step-00000004")


@pytest.mark.parametrize(
    ("damage", "start"),
    [
        (junk("metrics.jsonl"), 4),
        (junk("owner"), 4),
        (junk("checkpoints", "latest"), 4),
        (junk("checkpoints", ".staging-step-00000006"), 4),
        (junk("checkpoints", "step-00000006"), 4),
        (junk(*NEWEST), 2),
        (junk(*NEWEST, "manifest.json"), 2),
        (junk(*NEWEST, "COMPLETE"), 2),
        (folder(*NEWEST, "COMPLETE"), 2),
        (junk(*NEWEST, "engine"), 2),
    ],
)
def test_damage_that_a_run_gets_over(zygote: Zygote, run: Path, damage: Callable[[Path], None], start: int) -> None:
    damage(run)
    done = zygote.run(run.parent, *MORE)
    assert done.code == 0, done.stderr
    assert f"going on from step {start}" in done.stdout
    assert (run / "checkpoints" / "latest").read_text() == "step-00000006\n"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("kind") == "train"][-2:] == [5, 6]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (folder("metrics.jsonl"), "cannot write run/metrics.jsonl (Is a directory)"),
        (folder("config.yaml"), "config.yaml"),
        (folder("owner"), "run/owner: Is a directory"),
        (junk("logs"), "cannot write the log run/logs/rank-0000.log"),
        (junk("tokenizer"), "run/tokenizer: File exists"),
    ],
)
def test_damage_that_is_an_error(zygote: Zygote, run: Path, damage: Callable[[Path], None], text: str) -> None:
    damage(run)
    before = checkpoints(run)
    refused(zygote.run(run.parent, *MORE), text)
    assert checkpoints(run) == before


def test_no_whole_checkpoint_left(zygote: Zygote, run: Path) -> None:
    for marker in run.glob("checkpoints/*/COMPLETE"):
        marker.unlink()
    for command in (("export", "run", "--out", "model"), ("generate", "run")):
        refused(zygote.run(run.parent, *command), "run: no whole checkpoint in it")
    assert "starting: 4 steps" in zygote.run(run.parent, "train", "train.yaml").stdout


def test_a_run_folder_in_use(zygote: Zygote, folder: Path) -> None:
    """By a run that stands still in a save; `export` may read it meanwhile."""
    with Zygote() as other:
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        arguments = ("train", "../train.yaml", "--set", "run.dir=../run", "--set", "data.train=../data")
        arguments += ("--set", "data.tokenizer=../tokenizer")
        child = other.start(Attempt(arguments, elsewhere, Stop(1, "prepare", 1)))
        while (event := child.event()) is None or event[0] != "stopped":
            assert event not in (None, ("ended",)), (elsewhere / "stderr").read_text()
        refused(zygote.run(folder, *MORE), f"run: the run folder is in use by process {child.pid} on ")
        assert zygote.run(folder, "export", "run", "--out", "model").code == 0
        child.kill()
    assert zygote.run(folder, *MORE).code == 0


@pytest.mark.parametrize("out", ["run", "run/tokenizer", "run/checkpoints", "."])
def test_export_replaces_nothing_but_a_model(zygote: Zygote, run: Path, out: str) -> None:
    before = sorted(run.rglob("*"))
    refused(zygote.run(run.parent, "export", "run", "--out", out), "not empty; give another folder, or --force")
    refused(zygote.run(run.parent, "export", "run", "--out", out, "--force"), "holds no model, so --force does not")
    assert sorted(run.rglob("*")) == before


def test_a_tokenizer_that_is_gone_or_broken(zygote: Zygote, run: Path) -> None:
    (run / "tokenizer" / "tokenizer.json").write_text("{")
    refused(zygote.run(run.parent, "generate", "run"), "tokenizer.json: not a tokenizer")
    refused(zygote.run(run.parent, "export", "run", "--out", "model"), "tokenizer.json: not a tokenizer")
    assert not list(run.parent.glob("*model*"))
    shutil.rmtree(run / "tokenizer")
    refused(zygote.run(run.parent, "generate", "run"), "tokenizer: no such file")
