import pytest

from fmengine.errors import UserError
from fmengine.launch.torchrun import NEEDED, detect_torchrun

WHOLE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "1",
}


def test_a_whole_set_is_taken_as_it_is() -> None:
    ranks = detect_torchrun(WHOLE, gpus=4)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (5, 8, 1, 4)
    assert (ranks.node_rank, ranks.num_nodes, ranks.device) == (1, 2, "cuda:1")
    assert (ranks.master_addr, ranks.master_port, ranks.source) == ("node0", 29500, "torchrun")
    assert "RANK=5 of WORLD_SIZE=8" in ranks.reason


def test_without_group_rank_the_node_follows_from_the_rank() -> None:
    ranks = detect_torchrun({name: value for name, value in WHOLE.items() if name != "GROUP_RANK"}, gpus=0)
    assert ranks is not None
    assert (ranks.node_rank, ranks.num_nodes, ranks.device) == (1, 2, "cpu")


def test_nodes_of_different_size_when_their_number_is_said() -> None:
    ranks = detect_torchrun(WHOLE | {"WORLD_SIZE": "7", "GROUP_WORLD_SIZE": "2"}, gpus=0)
    assert ranks is not None
    assert (ranks.node_rank, ranks.num_nodes) == (1, 2)


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_no_launcher(environ: dict[str, str]) -> None:
    assert detect_torchrun(environ, gpus=1) is None


@pytest.mark.parametrize("missing", NEEDED)
def test_a_partial_set_names_what_is_missing(missing: str) -> None:
    with pytest.raises(UserError, match=rf"^{missing}: not set, though "):
        detect_torchrun({name: value for name, value in WHOLE.items() if name != missing}, gpus=1)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"RANK": "8"}, "RANK=8: must be below WORLD_SIZE"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4: must be below LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: must be below WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: does not divide WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=1: must be RANK=5"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2: must be below the number of nodes"),
        ({"GROUP_WORLD_SIZE": "1"}, "GROUP_RANK=1: must be below the number of nodes"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number"),
        ({"RANK": "$SLURM_PROCID"}, r"RANK=\$SLURM_PROCID: must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number of 1 or more"),
        ({"LOCAL_WORLD_SIZE": "4(x2)"}, r"LOCAL_WORLD_SIZE=4\(x2\): must be a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be below"),
    ],
)
def test_contradictions_name_the_variable(change: dict[str, str], start: str) -> None:
    with pytest.raises(UserError, match=f"^{start}"):
        detect_torchrun(WHOLE | change, gpus=4)
