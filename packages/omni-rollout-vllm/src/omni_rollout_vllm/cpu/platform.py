"""What the diffusion engine asks of a platform, answered for CPU."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

DEVICES = "OMNI_ROLLOUT_CPU_DEVICES"
"""Environment variable: worker processes that this machine is said to have places for."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc] # vllm_omni has no types
    """CPU as vLLM-Omni's out-of-tree platform.

    `is_available` says no: it is asked where an accelerator's caches and counters are touched.
    """

    _omni_enum = OmniPlatformEnum.OOT

    # -- device ------------------------------------------------------------------------------------

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """Return the one device."""
        del local_rank
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Count places for workers."""
        return int(os.environ.get(DEVICES, "1"))

    @classmethod
    def get_device_version(cls) -> str | None:
        """Return nothing: there is no driver."""
        return None

    @classmethod
    def is_available(cls) -> bool:
        """Say that there is no accelerator."""
        return False

    @classmethod
    def is_initialized(cls) -> bool:
        """Say that nothing is left to set up."""
        return True

    @classmethod
    def current_device(cls) -> int:
        """Return the one device."""
        return 0

    @classmethod
    def synchronize(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing runs asynchronously."""

    @classmethod
    def empty_cache(cls) -> None:
        """Nothing is cached."""

    # -- memory ------------------------------------------------------------------------------------

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        """Bytes that the machine has left."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:
        """Bytes left, and of the machine."""
        return cls.get_free_memory(), cls.get_device_total_memory()

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        """Most bytes that this process held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_allocated = max_memory_reserved

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """The system's counter cannot be reset."""

    # -- diffusion ---------------------------------------------------------------------------------

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Name the attention backend.

        Raises:
            ValueError: another one than SDPA was chosen.
        """
        del head_size, allow_trtllm_default
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            msg = f"attention backend {selected_backend!r}: on CPU there is TORCH_SDPA alone"
            raise ValueError(msg)
        return "omni_rollout_vllm.cpu.attention.CpuSDPABackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Models that run on CPU are small: compiling takes longer than they do."""
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        """There is nowhere to offload to."""
        return False

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Name the worker that sleeps without an accelerator's allocator."""
        return "omni_rollout_vllm.cpu.worker.CpuDiffusionWorker"
