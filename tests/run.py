"""Every test, area by area, each in a pytest of its own; closes with how long each took and how they went.

`make test` runs the quick half, `make test-all` (`--all`) what is marked slow too. Tests that need a GPU are
`make gpu-test`. Exit code 0 only where every area ran at least one test and none failed.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AREAS = {
    "units and parity": ("tests/unit", "tests/parity"),
    # what the images are made of; the images themselves are `make test-images`
    "recipes of the images": tuple(f"tests/image/test_{name}.py" for name in ("locks", "recipe", "definition")),
    "contract and distributed": ("tests/contract", "tests/distributed"),
    "default run": ("tests/end_to_end",),
    "faults": ("tests/faults",),
}


@dataclass(frozen=True)
class Outcome:
    """How an area went."""

    area: str
    seconds: float
    passed: int
    failed: int
    skipped: int


def run(area: str, folders: tuple[str, ...], everything: bool) -> Outcome:
    """Run an area's tests; a pytest that ends badly with no failed test (a crash, no test at all) is one failure."""
    report = ROOT / "build" / f"tests-{area.replace(' ', '-')}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    print(f"== {area}: {' '.join(folders)}", flush=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--durations=5", "--durations-min=5", *folders]
    if not everything:
        command += ["-m", "not slow"]
    # Tests are tiny and several processes share the cores; and no test may ask a hub for anything.
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = time.monotonic() - started
    suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else ()
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    passed = max(total - failed - skipped, 0)
    return Outcome(area, seconds, passed, failed or int(code != 0), skipped)


def main() -> int:
    """Run the areas; print a table and the closing line."""
    everything = "--all" in sys.argv[1:]
    outcomes = [run(area, folders, everything) for area, folders in AREAS.items()]
    print()
    for outcome in outcomes:
        print(f"{outcome.area:<26}{outcome.seconds:6.0f} s")
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{sum(o.passed for o in outcomes)} passed, {failed} failed, {sum(o.skipped for o in outcomes)} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
