"""Probes of what computes on GPUs; where there is none they import it, and say so."""

import os
import tempfile
from importlib import import_module
from typing import Any

from fmengine.doctor.found import NO_GPU, AbsentError, Found, close, gpu
from fmengine.doctor.probes_python import load, load_op


def triton() -> Found:
    """A kernel that adds."""
    module, version = load("triton")
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    torch = import_module("torch")
    kernel = import_module("fmengine.doctor.triton_kernel").double
    value = torch.arange(64.0, device=where)
    result = torch.empty_like(value)
    kernel[(1,)](value, result, 64, module.next_power_of_2(64))
    close(result, 2 * value, 0)
    return Found(version, where, "compiled and ran a kernel")


def nccl() -> Found:
    """A reduction in a group of one."""
    torch, _ = load("torch")
    if not torch.version.cuda:
        raise AbsentError("torch is built for the CPU")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    dist = import_module("torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        options = {"rank": 0, "world_size": 1, "device_id": torch.device(where)}
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", **options)
        value = torch.ones(3, device=where)
        dist.all_reduce(value)
        close(value, torch.ones(3, device=where), 0)
        dist.destroy_process_group()
    return Found(version, where)


def deepspeed_fused_adam() -> Found:
    """A step, beside torch's."""
    torch, _ = load("torch")
    if not torch.version.cuda:
        raise AbsentError("torch is built for the CPU")
    os.environ["DS_ACCELERATOR"] = "cuda"  # else, where there is no GPU, DeepSpeed would look at the CPU's ops
    _, found = load_op("fused_adam.FusedAdamBuilder")
    where = gpu()
    if where is None:
        return Found(found.version, detail=f"{found.detail}; {NO_GPU}")
    _compare_adam(import_module("deepspeed.ops.adam").FusedAdam, where)
    return Found(found.version, where, found.detail)


def apex_fused_adam() -> Found:
    """A step, beside torch's."""
    _, version = load("apex")
    _extension("amp_C")
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    _compare_adam(import_module("apex.optimizers").FusedAdam, where)
    return Found(version, where)


def apex_layer_norm() -> Found:
    """Layer and RMS norm with their gradients, beside torch's."""
    _, version = load("apex")
    _extension("fused_layer_norm_cuda")
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    torch, norms = import_module("torch"), import_module("apex.normalization")
    for ours, reference in ((norms.FusedLayerNorm, torch.nn.LayerNorm), (norms.FusedRMSNorm, torch.nn.RMSNorm)):
        _compare_norm(ours(64, eps=1e-5).to(where), reference(64, eps=1e-5).to(where), where)
    return Found(version, where, "layer norm and RMS norm")


def liger_kernel() -> Found:
    """RMS norm with its gradient, beside torch's."""
    _, version = load("liger_kernel", "liger-kernel")
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    torch, norms = import_module("torch"), import_module("liger_kernel.transformers.rms_norm")
    _compare_norm(norms.LigerRMSNorm(64, eps=1e-5).to(where), torch.nn.RMSNorm(64, eps=1e-5).to(where), where)
    return Found(version, where)


def flash_attn() -> Found:
    """Causal attention with its gradients, beside torch's."""
    module, version = load("flash_attn", "flash-attn")
    _extension("flash_attn_2_cuda")
    where = gpu()
    if where is None:
        return Found(version, detail=NO_GPU)
    torch = import_module("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, 2, 64, device=where, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    results = []
    attend = torch.nn.functional.scaled_dot_product_attention
    plain = attend(*(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=True).transpose(1, 2)
    for result in (module.flash_attn_func(q, k, v, causal=True), plain):
        results.append((result, *torch.autograd.grad(result.float().square().sum(), (q, k, v))))
    for value, reference in zip(*results, strict=True):
        close(value, reference, 3e-2)
    return Found(version, where, "forward and backward")


def _extension(name: str) -> None:
    """Import a compiled part, without which its package falls back in silence or fails later."""
    import_module("torch")  # its libraries must be loaded first
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{name} was not compiled") from error


def _compare_adam(optimizer: Any, where: str) -> None:
    torch = import_module("torch")
    results = []
    for kind in (optimizer, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, device=where))
        weight.grad = torch.linspace(1, 2, 64, device=where)
        kind([weight], lr=0.1, weight_decay=0.1).step()
        results.append(weight.detach())
    close(results[0], results[1], 1e-5)


def _compare_norm(ours: Any, reference: Any, where: str) -> None:
    torch = import_module("torch")
    results = []
    for module in (ours, reference):
        torch.manual_seed(0)
        value = torch.randn(8, 64, device=where, requires_grad=True)
        result = module(value)
        result.square().sum().backward()
        results.append((result.detach(), value.grad, module.weight.grad))
    for value, expected in zip(*results, strict=True):
        close(value, expected, 1e-3)
