"""`fmengine train`: train a model, or go on training it."""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fmengine.commands.arguments import add_config, positive
from fmengine.errors import UserError

if TYPE_CHECKING:
    from fmengine.config.schema import Config
    from fmengine.launch.ranks import Ranks

EPILOG = """\
Run twice, it goes on from the newest whole checkpoint in run.dir; --fresh starts over. Ctrl-C and SIGTERM stop it at
once and save nothing: the steps after that checkpoint are done again (checkpoint.interval says how many at most).
With N GPUs and no launcher it starts N workers here; under torchrun each process is one.

  fmengine train                                    the default model, some minutes
  fmengine train config.yaml --set train.steps=2000
  fmengine train config.yaml --workers 2            two processes, on CPUs too
  torchrun --nnodes 2 --nproc-per-node 4 ... -m fmengine train config.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, the workers, and how to start over."""
    parser.epilog = EPILOG
    add_config(parser)
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes to start here; by default one a GPU, or one"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start over, even where run.dir has a checkpoint to go on from"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Train, as one rank of a run or as the parent of local ones.

    Raises:
        UserError: a mistake in the input.
    """
    from fmengine.launch.detect import detect
    from fmengine.launch.device import count_gpus
    from fmengine.launch.local import alone, run_workers

    gpus = count_gpus(environ)
    ranks = detect(environ, gpus=gpus)
    if ranks.rank is not None:
        if args.workers not in (None, ranks.local_world_size):  # a local worker has its parent's arguments
            text = f"this process is rank {ranks.rank} of a run already ({ranks.source})"
            raise UserError(f"--workers {args.workers}: {text}; leave it out")
        return _work(args, ranks)
    workers = args.workers or ranks.world_size
    if workers == 1:
        return _work(args, alone(gpus=gpus))
    _check(args, workers, "cuda" if gpus else "cpu")  # once, and not by every worker
    return run_workers(sys.argv[1:], workers, environ, gpus=gpus)


def _check(args: argparse.Namespace, world_size: int, device: str) -> "Config":
    from fmengine.config.check import check_or_raise
    from fmengine.config.load import load_with_source
    from fmengine.config.source import problem

    config, source = load_with_source(args.config, args.sets)
    check_or_raise(config, world_size, source)
    if device == "cpu" and config.train.precision == "fp16":
        text = "DeepSpeed does not run fp16 on a CPU; use bf16 or fp32"
        raise UserError(source.line(problem("train.precision", text)))
    return config


def _work(args: argparse.Namespace, ranks: "Ranks") -> int:
    """Be a rank."""
    from fmengine.config.load import load

    os.environ.update(library_variables(ranks, os.environ))
    # with it DeepSpeed reduces through shared memory, whose kernel ignores process groups and spins for a dead rank
    os.environ.pop("LOCAL_SIZE", None)
    config = _check(args, ranks.world_size, ranks.device) if ranks.rank == 0 else load(args.config, args.sets)
    from fmengine.worker import Order, work

    # torchrun starts the same command anew after a failure: that is to go on, not to start over once more
    fresh = args.fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    work(Order.of(config, ranks, fresh=fresh, config_path=args.config, command=sys.argv))
    return 0


def library_variables(ranks: "Ranks", environ: Mapping[str, str]) -> dict[str, str]:
    """What DeepSpeed and torch read from the environment themselves, for a detected rank.

    LOCAL_RANK is the index of this rank's device: DeepSpeed makes that device the current one.
    """
    kind, _, index = ranks.device.partition(":")
    variables = {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": index or str(ranks.local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": str(ranks.master_port),
    }
    if kind == "cpu":
        # idle OpenMP threads otherwise spin, and take the cores from whoever shares them
        variables |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    return variables
