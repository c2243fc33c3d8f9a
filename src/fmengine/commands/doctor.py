"""`fmengine doctor`: whether every component is here, imports and computes."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmengine.doctor.rows import Row

EPILOG = """\
Each component is imported and computes something tiny, in a process of its own, so that one which crashes is a row
of the table and not its end. Where there is no GPU, what needs one is imported only, and the table says so.

  fmengine doctor                                   the components, and this machine
  fmengine doctor --image                           the components alone, as on a node with no GPU
  fmengine doctor --json | python3 -m json.tool

exit codes: 0 all that this image's variant needs is there and works, 1 something is missing or fails. Outside an
image it is the packages that FMEngine requires which have to be there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --image and --json."""
    parser.epilog = EPILOG
    parser.add_argument("--image", action="store_true", help="the components alone, and nothing of this machine")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Examine and print; returns 1 where something expected is missing or fails."""
    from fmengine.doctor.examine import component_rows, machine_rows
    from fmengine.start.machine import look
    from fmengine.start.plan import plan
    from fmengine.start.variants import IMAGE

    rows = component_rows(environ)
    if not args.image:
        machine = look(environ)
        rows += machine_rows(environ, machine, plan(environ, ["doctor"], machine).problems)
    wrong = [row for row in rows if row.wrong]
    if args.json:
        print(json.dumps({"variant": environ.get(IMAGE), "ok": not wrong, "rows": [asdict(row) for row in rows]}))
        return 1 if wrong else 0
    for line in table(rows):
        print(line)
    print()
    for row in wrong:
        print(f"{row.name}: {row.state}{f', {row.detail}' if row.detail else ''}; {row.advice}")
    place = f"image {environ[IMAGE]}" if IMAGE in environ else "no image"
    print(f"{place}: {len(wrong)} of {len(rows)} rows are wrong" if wrong else f"{place}: all that is needed is there")
    return 1 if wrong else 0


def table(rows: Sequence["Row"]) -> list[str]:
    """The rows in columns under a head; a row that is not needed and not there is in brackets."""
    head = ("component", "state", "version", "ran on", "")
    lines = [head]
    for row in rows:
        state = row.state if row.expected or row.state == "ok" else f"({row.state})"
        lines.append((row.name, state, row.version or "-", row.where or "-", row.detail))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
