"""`fmengine generate`: a sample from a checkpoint."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from fmengine.commands.arguments import positive

EPILOG = """\
  fmengine generate runs/default --prompt "def main("
  fmengine generate runs/default/checkpoints/step-00000500 --prompt "import" --temperature 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and how to sample."""
    parser.epilog = EPILOG
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT_OR_RUN",
        help="a checkpoint folder, or a run folder for its newest whole one",
    )
    parser.add_argument("--prompt", default="", help="text to continue; by default a new document")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="tokens to add at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_not_negative,
        default=0.8,
        metavar="T",
        help="above 1 wilder, below 1 tamer, 0 always the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=positive, default=50, metavar="K", help="draw from the K likeliest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="fixes what is drawn (default: %(default)s)")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:  # noqa: ARG001  the commands' interface
    """Print the prompt and its continuation.

    Raises:
        UserError: no whole checkpoint, no tokenizer, or a prompt that does not fit.
    """
    from fmengine.generate import generate

    print(generate(args.checkpoint, args.prompt, args.max_new_tokens, args.temperature, args.top_k, args.seed))
    return 0


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


_not_negative.__name__ = "number"  # what argparse calls it in an error
