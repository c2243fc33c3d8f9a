"""A minimal reader of DeepSpeed's checkpoint files: one parameter's full fp32 tensor, without DeepSpeed's engine.

Documentation of the format that tests/contract pins; nothing in src/ imports it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def load(path: Path) -> dict[str, Any]:
    """One file, through torch's restricted unpickler: four classes of DeepSpeed's are all it needs."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler]):
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def optimizer_files(folder: Path, model_rank: int = 0) -> list[Path]:
    """The optimizer shards of one model-parallel rank, in data-parallel order; bf16 runs prefix the name."""

    def data_rank(path: Path) -> int:
        return int(path.name.split("zero_pp_rank_")[1].split("_")[0])

    return sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_{model_rank:02d}_optim_states.pt"), key=data_rank)


def read_parameter(folder: Path, name: str, key: str, model_rank: int = 0) -> Tensor:
    """Full tensor of a parameter: `key` is weight, exp_avg or exp_avg_sq.

    `model_rank` is the pipeline stage or the tensor rank, whose own shard comes back.
    """
    shards = [load(path)["optimizer_state_dict"] for path in optimizer_files(folder, model_rank)]
    if "fp32_flat_groups" in shards[0]:
        shapes = load(folder / f"zero_pp_rank_0_mp_rank_{model_rank:02d}_model_states.pt")["param_shapes"]
        return read_zero3(shards, shapes, name, key)
    shapes = load(folder / f"mp_rank_{model_rank:02d}_model_states.pt")["param_shapes"]
    return read_zero12(shards, shapes, name, key)


def read_zero12(shards: list[dict[str, Any]], shapes: list[dict[str, torch.Size]], name: str, key: str) -> Tensor:
    """ZeRO-1 and 2 (and BF16_Optimizer): each group is one flat tensor, cut into equal partitions.

    `param_slice_mappings[group][name]` is the piece of this rank's partition that is the parameter's; the pieces in
    rank order are the parameter. A rank that holds no piece of it has no entry.
    """
    pieces = []
    for shard in shards:
        for group, mapping in enumerate(shard["param_slice_mappings"]):
            if name in mapping:
                if key == "weight":
                    flat = shard["single_partition_of_fp32_groups"][group]
                else:
                    flat = shard["base_optimizer_state"]["state"][group][key]
                pieces.append(flat.narrow(0, mapping[name].start, mapping[name].numel))
    shape = next(group[name] for group in shapes if name in group)
    return torch.cat(pieces).view(shape)


def read_zero3(shards: list[dict[str, Any]], shapes: list[dict[str, torch.Size]], name: str, key: str) -> Tensor:
    """ZeRO-3: every parameter is cut over all ranks, padded to a multiple; no map, the order says where.

    A rank's sub-groups (`fp32_flat_groups`, one optimizer state each; a group's parameters fill one up to
    `sub_group_size` elements) in a row are its slices of all parameters, in the order of `param_shapes`.
    """
    ordered = {key: shape for group in shapes for key, shape in group.items()}
    start = 0
    for other, shape in ordered.items():
        size = math.ceil(shape.numel() / len(shards))
        if other == name:
            break
        start += size
    pieces = []
    for shard in shards:
        if key == "weight":
            flat = torch.cat(list(shard["fp32_flat_groups"]))
        else:
            states = shard["optimizer_state_dict"]["state"]
            flat = torch.cat([states[index][key] for index in range(len(states))])
        pieces.append(flat.narrow(0, start, size))
    shape = ordered[name]
    return torch.cat(pieces)[: shape.numel()].view(shape)
