"""Runs that stop and go on, at one layout or across two; every function runs on each rank of a pool."""

from pathlib import Path
from typing import Any

import numpy as np

from support.data import write_documents
from support.deepspeed_state import read_state
from support.training import LENGTH, ROWS, VOCAB, Case, make_engine

HALF = 10
"""Steps before and after the interruption."""

WINDOWS = 60
"""Samples in an epoch: 8 a step, so that the interruption is in the middle of the second of almost three epochs."""


def make_data(folder: Path) -> Path:
    """A token data set of WINDOWS windows with documents of every length; its prefix."""
    generator = np.random.default_rng(5)
    documents, total = [], 0
    while total < WINDOWS * LENGTH + 1:
        length = int(generator.integers(1, 2 * LENGTH))
        length = min(length, WINDOWS * LENGTH + 1 - total)
        documents.append(generator.integers(0, VOCAB, length).tolist())
        total += length
    write_documents(folder / "data", documents, VOCAB)
    return folder / "data"


def loader_of(plan: Any, prefix: Path) -> Any:
    """The product's own loader over the data set."""
    from fmengine.data.loader import TrainLoader
    from fmengine.data.tokens import TokenReader

    reader = TokenReader(prefix)
    return TrainLoader(
        reader,
        documents=range(reader.num_documents),
        sequence_length=LENGTH,
        sizes=plan.sizes,
        topology=plan.topology,
        seed=3,
        vocab_size=VOCAB,
        fixed_documents=plan.topology.pipeline_parallel_size > 1,
    )


def go_on(engine: Any, loader: Any, steps: int) -> list[tuple[float, float, float]]:
    """Train; loss, gradient norm and the optimizer's own learning rate after each step, as exact values."""
    results = []
    for step in range(engine.step, engine.step + steps):
        result = engine.train_step(loader.step(step))
        (rate,) = {group["lr"] for group in engine._engine.optimizer.param_groups}
        results.append((float(result.loss), float(result.grad_norm), rate))
    return results


def straight_and_first_half(cases: list[Case], prefix: Path, folder: Path) -> list[Any]:
    """For each case: train 2 x HALF straight; then train HALF anew and save. Returns the straight results."""
    results = []
    for number, case in enumerate(cases):
        engine, plan = make_engine(case)
        loader = loader_of(plan, prefix)
        results.append((go_on(engine, loader, 2 * HALF), read_state(engine._engine)))
        engine, plan = make_engine(case)
        go_on(engine, loader, HALF)
        write_checkpoint(engine, plan, folder / str(number))
    return results


def second_half(cases: list[Case], prefix: Path, folder: Path) -> list[Any]:
    """For each case: take up its checkpoint as it is and train HALF."""
    results = []
    for number, case in enumerate(cases):
        engine, plan = make_engine(case)
        engine.load(checkpoint_of(folder / str(number)) / "engine")
        results.append((go_on(engine, loader_of(plan, prefix), HALF), read_state(engine._engine)))
    return results


def second_half_from_store(cases: list[Case], prefix: Path, folder: Path) -> list[Any]:
    """For each case: take up the store of checkpoint number 0, 1, ... at the case's own layout and train HALF."""
    from fmengine.checkpoint.store import ParameterStore
    from fmengine.engine.build import shard_splitter

    results = []
    for number, case in enumerate(cases):
        store = ParameterStore(folder / str(number) / "converted")
        engine, plan = make_engine(case, store.weight)
        engine.restore(store, shard_splitter(plan), HALF)
        results.append(go_on(engine, loader_of(plan, prefix), HALF))
    return results


def write_checkpoint(engine: Any, plan: Any, run_dir: Path) -> None:
    """A whole checkpoint of the engine."""
    from fmengine.checkpoint.collective import TorchCollective
    from fmengine.checkpoint.manifest import Layout, describe
    from fmengine.checkpoint.save import save

    collective = TorchCollective()
    if collective.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    collective.barrier()
    layout = Layout.of(plan.config, collective.world_size)
    header = describe(plan.config, step=engine.step, samples=engine.step * ROWS, layout=layout)
    save(run_dir, header, engine.save, collective=collective, keep=1)


def checkpoint_of(run_dir: Path) -> Path:
    """The one checkpoint of a run."""
    from fmengine.checkpoint.find import find_newest

    found = find_newest(run_dir, full=True)
    assert found is not None
    return found
