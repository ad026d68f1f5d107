"""Each internal of the installed pair that is relied on exists, and failures that do not raise are seen."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from omni_rollout_vllm import upstream, vllm_hooks
from omni_rollout_vllm.upstream import UpstreamError

# vLLM's own imports warn; elsewhere in these tests it is imported by the engine's process alone.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("path", [*upstream.INTERNALS, *upstream.SOURCES])
def test_what_is_relied_on_exists(path: str) -> None:
    assert upstream._find(path) is not None


def test_the_installed_pair_passes() -> None:
    assert upstream.check().versions == {"vllm": "0.30.0", "vllm-omni": "0.30.0"}


def test_a_renamed_internal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = importlib.import_module("vllm_omni.diffusion.worker.diffusion_worker")
    monkeypatch.delattr(worker.DiffusionWorker, "handle_wake_task")
    with pytest.raises(UpstreamError, match=r"DiffusionWorker\.handle_wake_task$"):
        upstream.check()


def test_the_platform_is_ours_where_vllm_runs_on_cpu() -> None:
    from vllm_omni.platforms import current_omni_platform

    assert vllm_hooks.omni_platform() == "omni_rollout_vllm.cpu.platform.CpuOmniPlatform"
    assert type(current_omni_platform).__name__ == "CpuOmniPlatform"
    assert current_omni_platform.get_free_memory() > 0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"error": "no such method"}, "call failed: no such method"),
        ({"todo": "not yet"}, "call failed: not yet"),
        ({"supported": False}, "call failed"),
        (
            SimpleNamespace(status="ERROR", error_msg="out of memory"),
            "call was acknowledged with ERROR: out of memory",
        ),
    ],
)
def test_failures_that_are_answers_become_exceptions(reply: Any, said: str) -> None:
    from omni_rollout_vllm.host import EngineError, check_reply

    with pytest.raises(EngineError, match=said):
        check_reply(reply, "call")


def test_replies_that_are_none_do_not() -> None:
    from omni_rollout_vllm.host import check_reply

    check_reply({"result": 1}, "call")
    check_reply(SimpleNamespace(status="SUCCESS"), "call")
