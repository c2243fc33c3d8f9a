"""A resolved config as YAML, for the run folder: what `load` reads back to the same config."""

import io

from ruamel.yaml import YAML

from fmengine.config.schema import Config


def dump(config: Config) -> str:
    """YAML text of a config, without the keys that are null."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keeps the schema's order
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json", exclude_none=True), stream)
    return stream.getvalue()
