"""What one rank does, from a checked config to the end of the run."""

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from fmengine.checkpoint.collective import TorchCollective
from fmengine.checkpoint.files import remove_tree
from fmengine.checkpoint.manifest import ENGINE, Layout, describe
from fmengine.checkpoint.owner import RunOwner
from fmengine.checkpoint.save import save
from fmengine.checkpoint.store import ParameterStore
from fmengine.config.batch import BatchSizes, solve
from fmengine.config.schema import Config
from fmengine.data.loader import EvalLoader, TrainLoader, training_documents
from fmengine.data.prefetch import Prefetch
from fmengine.data.tokenizer import load_tokenizer, token_byte_lengths
from fmengine.data.tokens import TokenReader
from fmengine.engine import process_group
from fmengine.engine.build import Build, Engine, build, shard_splitter
from fmengine.errors import PeerLostError
from fmengine.launch.ranks import Ranks
from fmengine.models.registry import family_of
from fmengine.models.resolved import known
from fmengine.models.weights import WeightSource, from_pretrained, from_seed
from fmengine.monitor import Monitor
from fmengine.monitor import describe as describe_device
from fmengine.monitor.logs import header, logging_to
from fmengine.parallel import Topology
from fmengine.prepare_run import CONVERTED, Start, prepare_run
from fmengine.train import FitPlan, Validation, fit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What a worker is told.

    Attributes:
        config: resolved; rank 0's has been checked.
        rank: this process.
        world_size: ranks of the run.
        device: this rank's device.
        host: rank 0's, where the ranks meet.
        port: that rank 0 listens on.
        fresh: start over, even where there is a checkpoint.
        config_path: where the config came from, for the log.
        command: the command line, for the log.
    """

    config: Config
    rank: int
    world_size: int
    device: torch.device
    host: str
    port: int
    fresh: bool
    config_path: Path | None
    command: Sequence[str]

    @classmethod
    def of(
        cls, config: Config, ranks: Ranks, *, fresh: bool, config_path: Path | None, command: Sequence[str]
    ) -> "Order":
        """The order for a detected rank."""
        return cls(
            config=config,
            rank=known(ranks.rank),
            world_size=ranks.world_size,
            device=torch.device(ranks.device),
            host=ranks.master_addr,
            port=known(ranks.master_port),
            fresh=fresh,
            config_path=config_path,
            command=command,
        )

    @property
    def topology(self) -> Topology:
        """Place of this rank."""
        parallel = self.config.parallel
        return Topology(
            rank=self.rank,
            world_size=self.world_size,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            sequence_parallel_size=parallel.sequence_parallel_size,
        )

    @property
    def sizes(self) -> BatchSizes:
        """The solved batch triangle."""
        return solve(self.config.batch, self.topology.data_parallel_size)


def work(order: Order) -> None:
    """Train to the end of the run.

    Raises:
        UserError: something the user can mend, on every rank that noticed.
        PeerLostError: another rank is gone.
    """
    run_dir = order.config.run.dir
    lines = header(order.command, order.config_path)
    with (
        logging_to(run_dir, rank=order.rank, world_size=order.world_size, header=lines) as stream,
        contextlib.ExitStack() as stack,
    ):
        owner = start = None
        store = process_group.open_store(rank=order.rank, world_size=order.world_size, host=order.host, port=order.port)
        with process_group.after_rank_0(store, order.rank):
            if order.rank == 0:
                owner = stack.enter_context(RunOwner(run_dir))
                start = prepare_run(
                    order.config, order.sizes, order.world_size, fresh=order.fresh, say=lambda text: _say(text, stream)
                )
        process_group.start(rank=order.rank, world_size=order.world_size, device=order.device, store=store)
        try:
            start = TorchCollective().broadcast_object(start)
            _train(order, start, owner, stream)
        except RuntimeError as error:
            if not process_group.is_lost_peer(error):
                raise
            raise PeerLostError(f"rank {order.rank} ends: another rank is gone; its line or log says why") from error
        # left only on the good way out: after an error the others may be in a collective that never ends
        process_group.stop()


def _train(order: Order, start: Start, owner: RunOwner | None, stream: TextIO) -> None:
    config, steps = start.config, start.config.train.steps
    if start.step >= steps:
        if order.rank == 0:
            _say(f"finished already: {start.checkpoint} has {start.step} of {steps} steps", stream)
        return
    loader, validation = _data(order, config)
    engine = _engine(order, start)
    monitor = _monitor(order, config, stream)
    layout = Layout.of(config, order.world_size)
    collective = TorchCollective()

    def save_engine(_: Any) -> Path:
        samples = engine.step * order.sizes.global_batch_size
        about = describe(
            config, step=engine.step, samples=samples, layout=layout, samples_per_epoch=loader.samples_per_epoch
        )
        keep = config.checkpoint.keep
        saved = save(config.run.dir, about, engine.save, collective=collective, keep=keep, owner=owner)
        if order.rank == 0:
            _remove_converted(config.run.dir)  # what this run has saved is at its own layout
        return saved

    plan = FitPlan(steps, config.train.eval_interval, config.checkpoint.interval)
    pin = order.device.type == "cuda"
    with Prefetch(loader, engine.step, steps, pin_memory=pin) as batches, contextlib.ExitStack() as stack:
        stack.callback(monitor.finish)
        fit(engine, batches, plan, validation=validation, save=save_engine, monitor=monitor)


def _remove_converted(run_dir: Path) -> None:
    """Every converted checkpoint, those of runs that were killed too; where one does not go, the others do not hang."""
    try:
        remove_tree(run_dir / CONVERTED)
    except OSError as error:
        log.warning("%s: could not be deleted: %s", run_dir / CONVERTED, error)


def _say(text: str, stream: TextIO) -> None:
    """One line for the user, and for the log."""
    log.info("%s", text)
    print(text, file=stream)


def _engine(order: Order, start: Start) -> Engine:
    """The engine with its weights: fresh, pretrained, resumed as it was, or resumed from another layout."""
    config = start.config
    store = ParameterStore(start.store) if start.store else None
    plan = Build(config, order.sizes, order.topology, order.device, _weights(config, start, store))
    engine = build(plan)
    if store is not None:
        engine.restore(store, shard_splitter(plan), start.step)
    elif start.checkpoint is not None:
        engine.load(start.checkpoint / ENGINE)
        if engine.step != start.step:
            raise RuntimeError(f"DeepSpeed took up step {engine.step}, the checkpoint is of step {start.step}")
    return engine


def _weights(config: Config, start: Start, store: ParameterStore | None) -> WeightSource:
    if store is not None:
        return store.weight
    if start.checkpoint is not None:
        shapes = family_of(config.model).parameter_shapes(config.model)
        return lambda name: torch.zeros(()).expand(shapes[name])  # `load` writes over it
    if config.model.pretrained is not None:
        return from_pretrained(config.model)
    return from_seed(config.model, config.run.seed)


def _data(order: Order, config: Config) -> tuple[TrainLoader, Validation | None]:
    data, topology = config.data, order.topology
    reader = TokenReader(known(data.train))
    training, held_out = training_documents(data, reader)
    common: dict[str, Any] = {
        "sequence_length": data.sequence_length,
        "topology": topology,
        "vocab_size": known(config.model.vocab_size),
        "mask_documents": data.mask_documents,
        "fixed_documents": topology.pipeline_parallel_size > 1,
    }
    loader = TrainLoader(reader, documents=training, sizes=order.sizes, seed=config.run.seed, **common)
    if data.validation is not None:
        reader = TokenReader(data.validation)
        held_out = range(reader.num_documents)
    if not held_out:
        return loader, None
    evaluation = EvalLoader(
        reader,
        documents=held_out,
        eval_samples=config.train.eval_samples,
        micro_batch_size=order.sizes.micro_batch_size,
        **common,
    )
    lengths = token_byte_lengths(load_tokenizer(data.tokenizer)) if data.tokenizer else None
    target_bytes = evaluation.target_bytes(lengths) if lengths is not None else 0
    return loader, Validation(lambda: evaluation, target_bytes)


def _monitor(order: Order, config: Config, stream: TextIO) -> Monitor:
    family, length = family_of(config.model), config.data.sequence_length
    return Monitor(
        config.run.dir,
        rank=order.rank,
        world_size=order.world_size,
        device=describe_device(order.device, config.train.precision),
        flops_per_token=family.flops_per_token(config.model, length),
        samples_per_step=order.sizes.global_batch_size,
        tokens_per_sample=length,
        log_interval=config.train.log_interval,
        stream=stream,
        terminal=stream.isatty() and sys.stderr.isatty(),
    )
