"""Probes of Python packages that compute on the CPU."""

import contextlib
import io
import math
import tempfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from fmengine.doctor.found import AbsentError, Found, close, gpu


def load(module: str, distribution: str | None = None) -> tuple[Any, str]:
    """Import a module; gives it and the version of its package."""
    try:
        version = metadata.version(distribution or module)
    except metadata.PackageNotFoundError as error:
        raise AbsentError(f"{error.name} is not installed") from error
    return import_module(module), version


def torch() -> Found:
    """A product and its gradient, on the GPU where there is one."""
    module, version = load("torch")
    where = gpu() or "cpu"
    weight = module.arange(6.0, device=where).reshape(2, 3).requires_grad_()
    (weight @ weight.T).sum().backward()
    close(weight.grad, 2 * weight.detach().sum(0).expand(2, 3), 1e-6)
    cuda = module.version.cuda
    detail = f"CUDA {cuda}, {' '.join(module.cuda.get_arch_list()) or _arches(module)}" if cuda else "built for the CPU"
    return Found(version, where, detail)


def _arches(module: Any) -> str:
    """What the build says, where torch.cuda will not without a driver."""
    flags = module._C._cuda_getArchFlags() if hasattr(module._C, "_cuda_getArchFlags") else None
    return str(flags or "architectures unknown")


def gloo() -> Found:
    """A reduction in a group of one."""
    module, version = load("torch")
    dist = import_module("torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        value = module.ones(3)
        dist.all_reduce(value)
        dist.destroy_process_group()
    close(value, module.ones(3), 0)
    return Found(version, "cpu", "torch's")


def deepspeed() -> Found:
    """The package, and which of its ops were compiled when it was installed."""
    module, version = load("deepspeed")
    info = import_module("deepspeed.git_version_info")
    ops = sorted(name for name, there in info.installed_ops.items() if there)
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    solved = import_module("deepspeed.runtime.config").DeepSpeedConfig(config)
    assert solved.gradient_accumulation_steps == 2, "its batch arithmetic is wrong"
    accelerator = module.accelerator.get_accelerator()._name
    return Found(version, "cpu", f"accelerator {accelerator}, prebuilt: {', '.join(ops) or 'no op'}")


def load_op(builder: str) -> tuple[Any, Found]:
    """Load one of DeepSpeed's ops, prebuilt or from the folder of torch's extensions; never compiles one.

    Raises:
        AbsentError: it would have to be compiled.
    """
    _, version = load("deepspeed")
    module, _, name = builder.rpartition(".")
    op = getattr(import_module(f"deepspeed.ops.op_builder.{module}"), name)()
    info = import_module("deepspeed.git_version_info")
    accelerator = import_module("deepspeed.accelerator").get_accelerator()._name
    prebuilt = bool(info.installed_ops.get(op.name)) and info.accelerator_name == accelerator  # as its own `load` does
    if not prebuilt:
        folder = import_module("torch.utils.cpp_extension")._get_build_directory(op.name, verbose=False)
        if not (Path(folder) / f"{op.name}.so").exists():
            raise AbsentError("it is not compiled; DeepSpeed would do so at its first use")
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = op.load(verbose=False)
    return loaded, Found(version, detail="prebuilt" if prebuilt else "compiled into torch's extensions")


def deepspeed_cpu_adam() -> Found:
    """A step of the optimizer for offloaded states."""
    _, found = load_op("cpu.cpu_adam.CPUAdamBuilder")
    module = import_module("torch")
    weight = module.nn.Parameter(module.ones(8))
    weight.grad = module.ones(8)
    import_module("deepspeed.ops.adam").DeepSpeedCPUAdam([weight], lr=0.1).step()
    close(weight.detach(), module.full((8,), 0.9), 1e-4)
    return Found(found.version, "cpu", found.detail)


def deepspeed_shm_comm() -> Found:
    """The op that CPU processes of one node reduce with."""
    op, found = load_op("cpu.comm.ShareMemCommBuilder")
    assert callable(op.initialize)
    return Found(found.version, "cpu", found.detail)


def transformers() -> Found:
    """A tiny LLaMA's logits."""
    module, version = load("transformers")
    torch_module = import_module("torch")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = module.LlamaConfig(vocab_size=16, **sizes)
    model = module.LlamaForCausalLM(config)
    loss = model(torch_module.tensor([[1, 2, 3]]), labels=torch_module.tensor([[1, 2, 3]])).loss
    assert abs(float(loss) - math.log(16)) < 1, f"loss {float(loss)} of a fresh model of 16 tokens"
    return Found(version, "cpu", "a tiny LLaMA")


def tokenizers() -> Found:
    """Train a tokenizer, encode and decode."""
    module, version = load("tokenizers")
    tokenizer = module.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["low lower lowest"] * 4, vocab_size=270, show_progress=False)
    assert tokenizer.decode(tokenizer.encode("lowest").ids) == "lowest"
    return Found(version, "cpu")


def safetensors() -> Found:
    """Write and read a tensor."""
    _, version = load("safetensors")
    module, torch_module = import_module("safetensors.torch"), import_module("torch")
    value = torch_module.arange(3.0)
    close(module.load(module.save({"x": value}))["x"], value, 0)
    return Found(version, "cpu")


def numpy() -> Found:
    """A product through its BLAS."""
    module, version = load("numpy")
    assert (module.eye(3) @ module.arange(3.0)).tolist() == [0, 1, 2]
    return Found(version, "cpu")


def pydantic() -> Found:
    """Validate through its compiled core."""
    module, version = load("pydantic")
    assert module.TypeAdapter(int).validate_python("7") == 7
    return Found(version, "cpu")


def ruamel_yaml() -> Found:
    """Read YAML 1.2."""
    module, version = load("ruamel.yaml")
    assert module.YAML(typ="safe", pure=True).load("a: 1e-4\nb: no") == {"a": 1e-4, "b": "no"}
    return Found(version, "cpu")


def rich() -> Found:
    """Print a line."""
    module, version = load("rich.console", "rich")
    out = io.StringIO()
    module.Console(file=out).print("[bold]x[/bold]")
    assert out.getvalue() == "x\n"
    return Found(version, "cpu")


def zstandard() -> Found:
    """Compress and decompress."""
    module, version = load("zstandard")
    assert module.decompress(module.compress(b"x" * 99)) == b"x" * 99
    return Found(version, "cpu")
