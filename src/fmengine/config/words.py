"""pydantic's errors in plain words."""

import json
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from fmengine.config.names import suggestion
from fmengine.config.source import Problem

KINDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path, written as text",
    "model_type": "must be a section, with its keys indented below it",
    "model_attributes_type": "must be a section, with its keys indented below it",
    "dict_type": "must be a section, with its keys indented below it",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "tuple_type": "must be a list in brackets",
    "too_long": "must be a list of {max_length}",
}


def explain(error: ErrorDetails) -> Problem:
    """What a user should read about one of pydantic's errors."""
    key, kind, given = error["loc"], error["type"], error.get("input")
    if kind == "extra_forbidden":
        return Problem(key, f"no such key; {suggestion(key)}")
    if kind == "missing":
        if isinstance(key[-1], int):
            return Problem(key[:-1], f"has too few values: {show(given)}")
        return Problem(key, "needed here, and not given")
    if kind == "value_error":
        return Problem(key, error["msg"].removeprefix("Value error, "))
    if kind not in KINDS:
        return Problem(key, f"{error['msg']}, not {show(given)}")
    return Problem(key, f"{KINDS[kind].format(**error.get('ctx', {}))}, not {show(given)}")


def show(value: Any) -> str:
    """A value from a config as one would write it in the file, shortened."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if value is None:
        return "empty"
    if isinstance(value, str):
        return f"the text {json.dumps(value[:40], ensure_ascii=False)}"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
