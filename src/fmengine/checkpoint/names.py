"""engine/layout.json: what DeepSpeed's files do not say about the names in them."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fmengine.errors import UserError

LAYOUT_FILE = "layout.json"


class EngineNames(BaseModel):
    """Names in one engine's files.

    Attributes:
        parameter_names: DeepSpeed's parameter name -> canonical name, of every rank.
        optimizer_order: model-parallel rank (DeepSpeed's `mp_rank_XX`) -> DeepSpeed's parameter names in
            the order of the optimizer's groups. Only ZeRO-0 needs it: there the moments are numbered.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameter_names: dict[str, str]
    optimizer_order: dict[int, list[str]] = {}


def merge(tables: Iterable[EngineNames]) -> EngineNames:
    """One table of the tables of all ranks; ranks that hold the same parameters say the same."""
    names: dict[str, str] = {}
    order: dict[int, list[str]] = {}
    for table in tables:
        names |= table.parameter_names
        order |= table.optimizer_order
    return EngineNames(parameter_names=names, optimizer_order=order)


def read(engine_folder: Path) -> EngineNames:
    """The table of an engine folder. Raises UserError when it is missing or broken."""
    path = engine_folder / LAYOUT_FILE
    try:
        return EngineNames.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {engine_folder} is no engine's folder") from None
    except ValidationError as error:
        raise UserError(f"{path}: {error.errors()[0]['msg']}; use another checkpoint") from None
