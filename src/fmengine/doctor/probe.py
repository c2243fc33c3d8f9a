"""`python -m fmengine.doctor.probe NAME`: one probe; its result is a line of JSON, the last of standard output."""

import json
import sys
from dataclasses import asdict
from typing import Any

from fmengine.doctor.found import AbsentError
from fmengine.doctor.probes import PROBES


def probe(name: str) -> dict[str, Any]:
    """Run a probe; gives state "ok", "absent" or "fails", and what goes with it."""
    try:
        return {"state": "ok", **asdict(PROBES[name]())}
    except AbsentError as error:
        return {"state": "absent", "detail": str(error)}
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return {"state": "fails", "detail": f"{type(error).__name__}: {first}".rstrip(": ")}


if __name__ == "__main__":
    print(f"\n{json.dumps(probe(sys.argv[1]))}", flush=True)
