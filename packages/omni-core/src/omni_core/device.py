"""The one place that knows device names.

Everything else asks for `current()` and works with the returned `torch.device`: CUDA, NPU, XPU, MPS
and CPU are told apart here alone (a test forbids device names elsewhere).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

ACCELERATORS = ("cuda", "npu", "xpu", "mps")
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "mps": "gloo", "cpu": "gloo"}
_RAY_RESOURCES = {"cuda": "GPU", "npu": "NPU", "xpu": "GPU", "cpu": "CPU", "mps": "CPU"}
_FUSED = ("cuda", "xpu", "mps")
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}


class DeviceError(RuntimeError):
    """The device asked for is not there."""


def _module(kind: str) -> Any:
    return getattr(torch, kind, None)


def available() -> list[str]:
    """List the device types of this machine, the preferred first; `cpu` is always last."""
    found = []
    for kind in ACCELERATORS:
        module = torch.backends.mps if kind == "mps" else _module(kind)
        if module is not None and module.is_available():
            found.append(kind)
    return [*found, "cpu"]


def count(kind: str) -> int:
    """Count this machine's devices of one type (cores for the CPU)."""
    if kind == "cpu":
        return os.cpu_count() or 1
    if kind == "mps":
        return int(kind in available())
    module = _module(kind)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def resolve(name: str = "auto", *, local_rank: int = 0) -> torch.device:
    """Turn a config's device name into the device of this process.

    Args:
        name: `auto` or a device type.
        local_rank: The process's place among those of this machine.

    Raises:
        DeviceError: the type is unknown or this machine has none; lists what it has.
    """
    have = available()
    kind = have[0] if name == "auto" else name
    if kind not in have:
        msg = f"device {name!r} is not available here; available: auto, {', '.join(have)}"
        raise DeviceError(msg)
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    index = local_rank % max(count(kind), 1)
    _module(kind).set_device(index)
    return torch.device(kind, index)


def is_accelerator(device: torch.device | str) -> bool:
    """Whether memory of *device* is apart from the host's."""
    return torch.device(device).type != "cpu"


def collective_backend(device: torch.device | str) -> str:
    """Name the torch.distributed backend of a device; accelerators carry gloo for CPU tensors too."""
    kind = torch.device(device).type
    backend = _BACKENDS[kind]
    return backend if kind in ("cpu", "mps") else f"cpu:gloo,{kind}:{backend}"


def fuses_optimizers(device: torch.device | str) -> bool:
    """Whether torch steps all weights on *device* in one kernel; the host's has no gain by it."""
    return torch.device(device).type in _FUSED


def ray_resource(kind: str) -> str:
    """Name the Ray resource that one device of this type takes."""
    return _RAY_RESOURCES[kind]


def visible_variable(kind: str) -> str | None:
    """Name the environment variable that hides devices of this type from a process, if one does."""
    return _VISIBLE.get(kind)


def synchronize(device: torch.device | str) -> None:
    """Wait until work queued on *device* is done: for timings."""
    kind = torch.device(device).type
    if kind != "cpu":
        _module(kind).synchronize()


def memory_allocated(device: torch.device | str) -> int:
    """Bytes that tensors hold on *device*; 0 where the host's memory is used."""
    kind = torch.device(device).type
    if kind == "cpu":
        return 0
    module = _module(kind)
    reader = getattr(module, "memory_allocated", None) or module.current_allocated_memory
    return int(reader())


def peak_memory(device: torch.device | str) -> int:
    """Most bytes that tensors held on *device* since the start; 0 where that is not counted."""
    module = _module(torch.device(device).type)
    reader = getattr(module, "max_memory_allocated", None)
    return int(reader()) if reader is not None else 0


def total_memory(device: torch.device | str) -> int:
    """Bytes of memory that *device* has; the machine's for devices that share it."""
    kind = torch.device(device).type
    if kind in ("cpu", "mps"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_module(kind).get_device_properties(torch.device(device)).total_memory)


def empty_cache(device: torch.device | str) -> None:
    """Give unused cached memory back to the device."""
    kind = torch.device(device).type
    if kind != "cpu":
        _module(kind).empty_cache()


def share(tensor: torch.Tensor) -> Any:
    """Make a handle by which another process opens memory of a CUDA device (written, not tested).

    The tensor must outlive every process that holds the handle open.

    Raises:
        DeviceError: memory of the tensor's device cannot be shared between processes.
    """
    if tensor.device.type != "cuda":
        msg = f"memory of {tensor.device} cannot be shared by a handle; memory of a CUDA device can"
        raise DeviceError(msg)
    reductions: Any = import_module("torch.multiprocessing.reductions")
    identity = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return identity, reductions.reduce_tensor(tensor)[1]


def open_shared(handle: Any) -> torch.Tensor:
    """Open the memory of a handle that `share` made in another process (written, not tested).

    Raises:
        DeviceError: this process does not see the device that holds the memory.
    """
    reductions: Any = import_module("torch.multiprocessing.reductions")
    identity, arguments = handle
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count("cuda"))]
    if identity not in seen:
        msg = f"the weights lie on CUDA device {identity}, which this process does not see: {seen}"
        raise DeviceError(msg)
    # The seventh argument is the sender's number of the device; it may have another one here.
    own = (*arguments[:6], seen.index(identity), *arguments[7:])
    found: torch.Tensor = reductions.rebuild_cuda_tensor(*own)
    return found


def rng_state(device: torch.device | str) -> dict[str, torch.Tensor]:
    """Take the generator states of the CPU and of *device*."""
    states = {"cpu": torch.get_rng_state()}
    kind = torch.device(device).type
    if kind != "cpu":
        states[kind] = _module(kind).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Put back what `rng_state` took."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            _module(kind).set_rng_state(state)
