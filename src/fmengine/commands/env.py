"""`fmengine env`: which rank this process is, and why."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from fmengine.launch.detect import detect
from fmengine.launch.device import count_gpus

EPILOG = """\
rank is null where this process is no rank of a run, as in a plain shell; the other values are then
those of the run that `fmengine train` would start here.

  fmengine env                                      on a workstation or a login node
  torchrun --nproc-per-node 2 -m fmengine env --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print this process's place.

    Raises:
        UserError: the launcher's variables contradict each other.
    """
    values = asdict(detect(environ, gpus=count_gpus(environ)))
    if args.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name + ':':<18}{'-' if value is None else value}")
    return 0
