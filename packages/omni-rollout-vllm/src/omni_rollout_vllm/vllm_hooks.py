"""What vLLM and vLLM-Omni call in each of their processes (entry points). Imports nothing heavy.

- `torchvision_importable` (`vllm.platform_plugins`) runs first, before anything imports torchvision.
- `omni_platform` (`vllm_omni.platform_plugins`) offers the CPU platform where vLLM runs on CPU.
- `register_pipelines` (`vllm_omni.general_plugins`) makes this package's pipeline classes known.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TORCHVISION = "torchvision"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _OperatorSchemas(MetaPathFinder):
    """Declares two operators of torchvision just before it is imported.

    torchvision's wheel is built for CUDA; beside a CPU build of torch its C extension does not load,
    and its import then fails on the two operators whose schemas that extension would have declared.
    Nothing here calls them.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Declare the operators when torchvision is looked for; never finds a module itself."""
        del path, target
        if fullname == TORCHVISION:
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and torch.version.hip is None:
                for name in _OPERATORS:
                    torch.library.define(f"{TORCHVISION}::{name}", _SCHEMA)
        return None


def torchvision_importable() -> None:
    """Make `import torchvision` work beside a CPU build of torch; offers no platform.

    A process that imports diffusers before vLLM calls it first.
    """
    known = any(isinstance(finder, _OperatorSchemas) for finder in sys.meta_path)
    if TORCHVISION not in sys.modules and not known:
        sys.meta_path.insert(0, _OperatorSchemas())


def omni_platform() -> str | None:
    """Name the CPU platform, or None where vLLM itself runs on another device."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return None
    return "omni_rollout_vllm.cpu.platform.CpuOmniPlatform"


def register_pipelines() -> None:
    """Register a recording pipeline for each family, and what CPU workers need."""
    from omni_rollout_vllm import pipelines
    from omni_rollout_vllm.cpu import async_output

    async_output.install()
    pipelines.register()
