"""`fmengine train`: train a model, or go on training it."""

import argparse
from collections.abc import Mapping

from fmengine.commands.arguments import add_config, positive

EPILOG = """\
Run twice, it goes on from the newest whole checkpoint in run.dir; --fresh starts over.
With N GPUs and no launcher it starts N workers here; under torchrun each process is one.

  fmengine train                                    the default model, about a minute
  fmengine train config.yaml --set train.steps=2000
  fmengine train config.yaml --workers 2            two processes, on CPUs too
  torchrun --nnodes 2 --nproc-per-node 4 ... -m fmengine train config.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, the workers, and how to start over."""
    parser.epilog = EPILOG
    add_config(parser, optional=True)
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes to start here; by default one a GPU, or one"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start over, even where run.dir has a checkpoint to go on from"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Train."""
    raise NotImplementedError
