import pytest

from fmengine.launch import detect as module
from fmengine.launch.detect import detect
from fmengine.launch.local import alone


@pytest.mark.parametrize(("gpus", "workers", "device"), [(0, 1, "cpu"), (1, 1, "cuda:0"), (4, 4, "cuda:0")])
def test_a_plain_shell_is_no_rank(gpus: int, workers: int, device: str) -> None:
    ranks = detect({"HOME": "/"}, gpus=gpus)
    assert (ranks.rank, ranks.local_rank, ranks.master_port) == (None, None, None)
    assert (ranks.world_size, ranks.local_world_size, ranks.num_nodes) == (workers, workers, 1)
    assert (ranks.device, ranks.source) == (device, "local")
    assert f"would start {workers} here" in ranks.reason


def test_the_first_detector_that_knows_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def silent(environ: object, *, gpus: int) -> None:
        asked.append("silent")

    def known(environ: object, *, gpus: int) -> object:
        asked.append("known")
        return "ranks"

    monkeypatch.setattr(module, "DETECTORS", (silent, known, silent))
    assert detect({}, gpus=0) == "ranks"
    assert asked == ["silent", "known"]


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda:0"), (8, "cuda:0")])
def test_the_only_process_of_a_run(gpus: int, device: str) -> None:
    ranks = alone(gpus=gpus)
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size) == (0, 0, 1, 1)
    assert ranks.device == device
    assert ranks.master_port is not None
