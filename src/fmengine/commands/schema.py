"""`fmengine schema`: the JSON Schema of a config file."""

import argparse
import json
from collections.abc import Mapping

EPILOG = """\
An editor that knows YAML checks a config while one writes it:
  fmengine schema > fmengine.schema.json
and as the config's first line, for editors with yaml-language-server:
  # yaml-language-server: $schema=fmengine.schema.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    parser.epilog = EPILOG


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:  # noqa: ARG001
    """Print the schema."""
    from fmengine.config.schema import Config

    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "FMEngine config",
        **{key: value for key, value in Config.model_json_schema().items() if key != "title"},
    }
    print(json.dumps(schema, indent=2))
    return 0
