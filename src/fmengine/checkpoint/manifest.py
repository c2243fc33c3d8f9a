"""What a checkpoint says about itself: `manifest.json`, and the questions one asks of it.

The manifest lists every file with its size and digest; the marker COMPLETE holds the digest of the
manifest, so that one small file vouches for the whole folder.
"""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fmengine import __version__
from fmengine.checkpoint.files import HASH, digest_text
from fmengine.config.model import ModelConfig
from fmengine.config.schema import Config
from fmengine.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
ENGINE = "engine"

NOT_ARCHITECTURE = frozenset({"pretrained", "initializer_range", "max_position_embeddings"})
"""Keys of `model:` that may change between two runs of one model: none alters a tensor or what it computes."""


class FormatError(UserError):
    """A checkpoint of a format that this version does not read."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Layout(_Record):
    """How the state is spread over ranks; the same layout means that DeepSpeed's own files load as they are."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    zero_stage: int
    precision: str

    @classmethod
    def of(cls, config: Config, world_size: int) -> "Layout":
        """The layout that a config asks for at a world size."""
        return cls(
            world_size=world_size,
            tensor=config.parallel.tensor_parallel_size,
            pipeline=config.parallel.pipeline_parallel_size,
            sequence=config.parallel.sequence_parallel_size,
            zero_stage=config.parallel.zero_stage,
            precision=config.train.precision,
        )


class FileRecord(_Record):
    """One file of a checkpoint: size in bytes and hex digest."""

    bytes: int
    digest: str


class Header(_Record):
    """All that a manifest says beside its list of files.

    Attributes:
        step: optimizer steps taken.
        samples: training samples consumed, counted over the whole run: where the data goes on.
        config: the resolved config, as JSON values.
        versions: of fmengine, torch, deepspeed and python that wrote it.
        layout: how the state is spread.
        model_fingerprint: digest of the architecture (`fingerprint`).
        rng: what is needed to go on with the same random numbers: the loader and the initial weights are
            functions of the seed, the loader of the samples in an epoch too (None: not known); a model with
            dropout would add generator states.
    """

    format_version: int = FORMAT_VERSION
    step: int
    samples: int
    config: dict[str, Any]
    versions: dict[str, str]
    layout: Layout
    model_fingerprint: str
    rng: dict[str, Any]


class Manifest(Header):
    """A whole manifest: the header and, for each file by its path in the checkpoint, size and digest under `hash`."""

    hash: str
    files: dict[str, FileRecord]

    def text(self) -> str:
        """The JSON that goes into the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    @property
    def model(self) -> ModelConfig:
        """The architecture of the weights."""
        return ModelConfig.model_validate(self.config["model"])


def describe(
    config: Config, *, step: int, samples: int, layout: Layout, samples_per_epoch: int | None = None
) -> Header:
    """The header for a state of a run under `config` (resolved), with the versions of this process."""
    return Header(
        step=step,
        samples=samples,
        config=config.model_dump(mode="json"),
        versions={
            "fmengine": __version__,
            "torch": metadata.version("torch"),
            "deepspeed": metadata.version("deepspeed"),
            "python": platform.python_version(),
        },
        layout=layout,
        model_fingerprint=fingerprint(config.model),
        rng={"seed": config.run.seed, "samples_per_epoch": samples_per_epoch},
    )


def complete(header: Header, files: dict[str, FileRecord]) -> Manifest:
    """The manifest over a list of files hashed with `HASH`."""
    return Manifest(**header.model_dump(), hash=HASH, files=files)


def architecture(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model:` that decide what the tensors are and compute, as JSON values."""
    values = model.model_dump(mode="json")
    return {key: value for key, value in values.items() if key not in NOT_ARCHITECTURE}


def fingerprint(model: ModelConfig) -> str:
    """Hex digest of the architecture of a resolved model."""
    return digest_text(json.dumps(architecture(model), sort_keys=True))


def read(checkpoint: Path) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        FormatError: it is of a format that this version does not read.
        UserError: it is missing or broken.
    """
    path = checkpoint / MANIFEST
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is {checkpoint} a checkpoint?") from None


def parse(text: str, path: Path) -> Manifest:
    """A manifest from its text; `path` is for the messages. Raises UserError as `read` does."""
    try:
        raw = json.loads(text)
        version = raw["format_version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a checkpoint manifest; resume from another checkpoint") from None
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: format_version {version}, but fmengine {__version__} reads {FORMAT_VERSION}; "
            f"use the version that wrote it: {raw.get('versions', {}).get('fmengine', '?')}"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {key}: {first['msg']}; resume from another checkpoint") from None


def check_model(manifest: Manifest, model: ModelConfig, checkpoint: Path) -> None:
    """Raise UserError, naming the keys that differ, when a checkpoint holds another model than the config's."""
    if manifest.model_fingerprint == fingerprint(model):
        return
    saved, wanted = manifest.config["model"], architecture(model)
    differing = [
        f"model.{key} is {saved.get(key)!r} there and {value!r} here"
        for key, value in wanted.items()
        if saved.get(key) != value
    ]
    raise UserError(
        f"{checkpoint}: checkpoint of another model: {'; '.join(differing) or 'its fingerprint differs'}; "
        "mend the config or choose another run.dir"
    )


class LayoutChange(_Record):
    """One way in which the wanted layout is not the saved one."""

    key: str
    saved: int | str
    wanted: int | str


def layout_changes(saved: Layout, wanted: Layout) -> tuple[LayoutChange, ...]:
    """What differs between two layouts; empty: DeepSpeed's files load as they are, else convert first."""
    before, after = saved.model_dump(), wanted.model_dump()
    return tuple(
        LayoutChange(key=key, saved=before[key], wanted=after[key]) for key in before if before[key] != after[key]
    )
