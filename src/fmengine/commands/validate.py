"""`fmengine validate`: everything about a run that can be checked without a GPU."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fmengine.commands.arguments import add_config, positive

if TYPE_CHECKING:
    from fmengine.config.schema import Config

EPILOG = """\
Checked: every key and value; the layout and the batch for the world size; that data, tokenizer and pretrained
weights are there and whole; the tokenizer against the vocabulary; that run.dir can be written, with room for the
checkpoints. Nothing is written. Exit code 0, or 2 with every mistake found, by file:line.

  fmengine validate config.yaml --world-size 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config and the world size."""
    parser.epilog = EPILOG
    add_config(parser)
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks of the run, one a GPU; by default what would start here",
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Check, and print a summary.

    Raises:
        UserError: all mistakes.
    """
    from fmengine.config.check import check_or_raise
    from fmengine.config.load import load_with_source
    from fmengine.launch.detect import detect
    from fmengine.launch.device import count_gpus

    config, source = load_with_source(args.config, args.sets)
    world_size = args.world_size or detect(environ, gpus=count_gpus(environ)).world_size
    check_or_raise(config, world_size, source)
    for line in summary(config, world_size):
        print(line)
    print(f"{source.name}: no mistakes found")
    return 0


def summary(config: "Config", world_size: int) -> list[str]:
    """What the run is, in a few lines: model, layout, batch, disk."""
    from fmengine.config.batch import solve
    from fmengine.config.size import checkpoint_bytes, count_parameters, human
    from fmengine.parallel import Topology

    parallel, model = config.parallel, config.model
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.sequence_parallel_size)
    data = Topology(0, world_size, *sizes).data_parallel_size
    batch = solve(config.batch, data)
    tokens = batch.global_batch_size * config.data.sequence_length
    lines = [
        f"model       {model.family}, {count_parameters(model):,} parameters, {model.num_hidden_layers} layers, "
        f"hidden size {model.hidden_size}, vocabulary {model.vocab_size}",
        f"layout      world size {world_size} = data {data} x sequence {sizes[2]} x tensor {sizes[0]} x "
        f"pipeline {sizes[1]}, ZeRO-{parallel.zero_stage}, {config.train.precision}",
        f"batch       {batch.global_batch_size} global = {batch.micro_batch_size} micro x "
        f"{batch.gradient_accumulation_steps} accumulation x {data} data; {tokens:,} tokens a step",
        f"run         {config.train.steps:,} steps, {config.train.steps * tokens:,} tokens, in {config.run.dir}",
        f"checkpoint  {human(checkpoint_bytes(model, config.train))} at most, {config.checkpoint.keep} kept",
    ]
    stages, micro = sizes[1], batch.gradient_accumulation_steps
    if stages > 1:
        # Huang et al. 2019, GPipe, arXiv:1811.06965: (stages - 1) / (micro-batches + stages - 1).
        idle = (stages - 1) / (micro + stages - 1)
        lines.append(f"pipeline    {idle:.0%} of the time idle: {micro} micro-batches fill {stages} stages")
    return lines
