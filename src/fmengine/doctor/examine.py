"""The doctor's examination: the components, and the machine."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmengine.doctor.expected import expected, required, unfit
from fmengine.doctor.probes import PROBES
from fmengine.doctor.rows import ABSENT, FAILS, OK, Row, run_probes
from fmengine.start import checks
from fmengine.start.folders import ROOM, VARIABLES, writable
from fmengine.start.machine import Machine
from fmengine.start.variants import IMAGE, VARIANTS

GPU_QUERY = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def component_rows(environ: Mapping[str, str]) -> list[Row]:
    """A row for every component, in the table's order."""
    needed = required()
    return rows_of(run_probes([*PROBES], environ), environ.get(IMAGE), needed)


def rows_of(results: Mapping[str, Mapping[str, Any]], variant: str | None, needed: Mapping[str, str]) -> list[Row]:
    """Rows from what the probes said.

    Args:
        results: name to state, version, where, detail.
        variant: the image's; None outside one.
        needed: package to its requirement in pyproject.toml.
    """
    must, rows = expected(variant), []
    for name, result in results.items():
        state, detail = str(result["state"]), str(result.get("detail", ""))
        version = str(result.get("version", ""))
        if state == OK and name in needed and unfit(needed[name], version):
            state, detail = FAILS, f"{needed[name]} is required"
        row = Row(name, state, name in must, version, str(result.get("where", "")), detail)
        rows.append(Row(*_fields(row), advice=_advice(row, variant, needed)))
    return rows


def _fields(row: Row) -> tuple[str, str, bool, str, str, str]:
    return row.name, row.state, row.expected, row.version, row.where, row.detail


def _advice(row: Row, variant: str | None, needed: Mapping[str, str]) -> str:
    if not row.wrong:
        return ""
    if variant is not None:
        return f"image {variant} is not whole or was changed: fetch or build it again"
    package = needed.get(row.name)
    return f"pip install '{package}'" if package else "repair this Python environment; make install builds one"


def machine_rows(environ: Mapping[str, str], machine: Machine, problems: Sequence[str] = ()) -> list[Row]:
    """Rows about the machine: GPUs and driver, libraries of the host, shared memory, folders.

    Args:
        environ: as the start left it.
        machine: what there is.
        problems: what else the start found.
    """
    rows = [_gpu_row(environ, machine), _glibc_row(machine), _memory_row(environ, machine)]
    names = ["HOME", *(name for name in VARIABLES if name in environ)]
    rows.append(_folder_row("TMPDIR", {"TMPDIR": "/tmp", **environ}, machine))
    rows += [_folder_row(name, environ, machine) for name in names]
    return rows + [Row("start", FAILS, True, detail=problem, advice="see the line") for problem in problems]


def _gpu_row(environ: Mapping[str, str], machine: Machine) -> Row:
    variant = environ.get(IMAGE, "")
    cuda = variant in VARIANTS and VARIANTS[variant].cuda and not checks.wants_cpu(environ)
    found = gpus(environ)
    problem = next(iter(checks.gpu_problems(variant, environ, machine)), "") if cuda else ""
    state = FAILS if problem and machine.gpu_devices else OK if found or machine.has_libcuda else ABSENT
    state = ABSENT if problem and not machine.gpu_devices else state
    detail = problem.partition("; ")[0] or "; ".join(found) or "none is visible"
    return Row("gpu", state, cuda, machine.driver or "", "", detail, problem.partition("; ")[2])


def gpus(environ: Mapping[str, str]) -> list[str]:
    """A GPU's name, driver and memory each, as nvidia-smi says; none where it is not there or fails."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, *GPU_QUERY], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _glibc_row(machine: Machine) -> Row:
    version = ".".join(map(str, machine.glibc))
    found = checks.glibc_problems(machine)
    if found:
        detail, _, advice = found[0].partition("; ")
        return Row("host libraries", FAILS, True, version, "", detail, advice)
    return Row("host libraries", OK, True, version, "", f"{len(machine.host_libraries)} of the host fit this glibc")


def _memory_row(environ: Mapping[str, str], machine: Machine) -> Row:
    """As many ranks as there are GPUs share it; on a CPU, two could."""
    found = checks.memory_problems({**environ, "LOCAL_WORLD_SIZE": "2"}, [], machine)
    size = f"{(machine.shared_memory or 0) >> 20} MB"
    if found:
        detail, _, advice = found[0].partition("; ")
        needed = checks.local_ranks(environ, [], machine) > 1
        return Row("/dev/shm", FAILS, needed, size, "", detail, advice)
    return Row("/dev/shm", OK, True, size)


def _folder_row(name: str, environ: Mapping[str, str], machine: Machine) -> Row:
    value = environ.get(name)
    inside = IMAGE in environ
    if not value:
        return Row(name, ABSENT, inside, detail="not set", advice=f"set {name}")
    baked = Path(value).is_relative_to(machine.prefix)
    if baked or writable(Path(value), machine):
        return Row(name, OK, inside, detail=f"{value}{' (part of the image)' if baked and inside else ''}")
    advice = f"set {name} to a folder that can be written to, with {ROOM >> 20} MB free"
    return Row(name, FAILS, inside, detail=f"{value} cannot be written to", advice=advice)
