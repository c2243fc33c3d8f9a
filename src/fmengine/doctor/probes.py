"""The probes: each imports one component, computes something tiny with it, and checks the result.

They import what they probe inside, and run in a process of their own (`python -m fmengine.doctor.probe NAME`).
"""

from collections.abc import Callable

from fmengine.doctor import probes_gpu, probes_python, probes_system
from fmengine.doctor.found import Found

PROBES: dict[str, Callable[[], Found]] = {
    "python": probes_system.python,
    "fmengine": probes_system.fmengine,
    "torch": probes_python.torch,
    "gloo": probes_python.gloo,
    "triton": probes_gpu.triton,
    "c-compiler": probes_system.c_compiler,
    "nccl": probes_gpu.nccl,
    "rdma-core": probes_system.rdma_core,
    "deepspeed": probes_python.deepspeed,
    "deepspeed-fused-adam": probes_gpu.deepspeed_fused_adam,
    "deepspeed-cpu-adam": probes_python.deepspeed_cpu_adam,
    "deepspeed-shm-comm": probes_python.deepspeed_shm_comm,
    "flash-attn": probes_gpu.flash_attn,
    "apex-fused-adam": probes_gpu.apex_fused_adam,
    "apex-layer-norm": probes_gpu.apex_layer_norm,
    "liger-kernel": probes_gpu.liger_kernel,
    "transformers": probes_python.transformers,
    "tokenizers": probes_python.tokenizers,
    "safetensors": probes_python.safetensors,
    "numpy": probes_python.numpy,
    "pydantic": probes_python.pydantic,
    "ruamel.yaml": probes_python.ruamel_yaml,
    "rich": probes_python.rich,
    "zstandard": probes_python.zstandard,
    "ninja": probes_system.ninja,
}
"""In the order of the table. A package's probe has the package's name."""
