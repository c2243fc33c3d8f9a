import json
import os
import subprocess
import sys

import pytest

from fmengine.errors import UserError
from fmengine.launch.detect import detect
from fmengine.launch.local import free_port, run_workers, worker_environ


def test_workers_are_told_their_ranks_as_torchrun_would() -> None:
    environ = {"HOME": "/home/x", "RANK": "stale"}
    ranks = [detect(worker_environ(environ, rank, 3, 20001), gpus=0) for rank in range(3)]
    assert [(found.rank, found.local_rank, found.world_size) for found in ranks] == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert {(found.master_addr, found.master_port, found.num_nodes) for found in ranks} == {("127.0.0.1", 20001, 1)}
    assert worker_environ(environ, 0, 3, 20001)["HOME"] == "/home/x"


def test_workers_share_the_cores_unless_told_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))
    assert worker_environ({}, 0, 1, 1)["OMP_NUM_THREADS"] == str(cores)
    assert worker_environ({}, 0, 10 * cores, 1)["OMP_NUM_THREADS"] == "1"
    assert worker_environ({"OMP_NUM_THREADS": "7"}, 0, 2, 1)["OMP_NUM_THREADS"] == "7"


def test_a_port_is_free_and_outside_the_ephemeral_range() -> None:
    ports = {free_port((20000, 65535)) for _ in range(20)}
    assert all(10000 <= port < 20000 for port in ports)
    assert len(ports) > 1
    with pytest.raises(UserError, match="no free TCP port"):
        free_port((10000, 65535))


def test_more_workers_than_gpus() -> None:
    with pytest.raises(UserError, match=r"^--workers 3: more than the 2 visible GPUs"):
        run_workers(["env"], 3, {}, gpus=2)


def test_workers_run_this_same_command_and_rank_0_alone_is_heard() -> None:
    code = (
        "import os, sys; from fmengine.launch.local import run_workers; "
        "sys.exit(run_workers(['env', '--json'], 2, dict(os.environ), gpus=0))"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert json.loads(done.stdout)["rank"] == 0
    assert json.loads(done.stdout)["world_size"] == 2
    assert done.stderr == ""
