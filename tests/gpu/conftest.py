"""Tests of a GPU machine; `make gpu-test` runs them. Where there is no GPU they fail, they are never skipped."""

import os

import pytest
import torch

from fmengine.commands.train import library_variables
from fmengine.engine import process_group
from fmengine.launch.local import alone


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """One rank on the first GPU."""
    assert torch.cuda.is_available(), "tests/gpu needs a GPU; `make test` is the command for a machine without one"
    ranks = alone(gpus=1)
    os.environ.update(library_variables(ranks, os.environ))
    store = process_group.open_store(rank=0, world_size=1, host=ranks.master_addr, port=ranks.master_port)
    process_group.start(rank=0, world_size=1, device=torch.device("cuda:0"), store=store)
    yield
    process_group.stop()
