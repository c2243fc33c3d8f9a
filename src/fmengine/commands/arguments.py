"""Arguments that several commands share."""

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG and --set."""
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        nargs="?",
        help="a config file (YAML), or the name of a shipped recipe such as llama-3-8b; by default the recipe "
        "`default`; relative paths in it count from the current directory",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=VALUE",
        help="put a value over the config's, such as optimizer.learning_rate=1e-4; can be repeated, the last one wins",
    )


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse's `type`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


positive.__name__ = "whole number"  # what argparse calls it in an error
