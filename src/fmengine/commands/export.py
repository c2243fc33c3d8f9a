"""`fmengine export`: a checkpoint as a folder that Hugging Face Transformers loads."""

import argparse
from collections.abc import Mapping
from pathlib import Path

EPILOG = """\
The folder appears only when it is whole and verified: each block, and the whole model where two of it fit in
memory, computes in Transformers what it computes here. No more than one file is held in memory while writing.

  fmengine export runs/default --out model
  fmengine export runs/default/checkpoints/step-00000500 --out model --dtype float32 --max-shard-size 2GB
"""

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the folder and its format."""
    parser.epilog = EPILOG
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint folder, or a run folder for its newest whole one",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the exported weights (default: %(default)s)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size,
        default=UNITS["GB"] * 5,
        metavar="SIZE",
        help="split the weights into files of at most this size, such as 2GB (default: 5GB)",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare with Transformers")
    parser.add_argument("--force", action="store_true", help="replace a folder that is not empty")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:  # noqa: ARG001  the commands' interface
    """Export, a line a stage.

    Raises:
        UserError: no whole checkpoint, or a folder that cannot be written or is not empty.
    """
    from fmengine.export import export

    export(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        verify_result=not args.no_verify,
        force=args.force,
    )
    return 0


def size(text: str) -> int:
    """Bytes from a number and KB, MB, GB or TB (powers of 1000), for argparse's `type`."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in UNITS or not number.strip().isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 5GB")
    return int(number) * UNITS[unit]
