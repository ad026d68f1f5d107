from importlib.metadata import entry_points, metadata, requires

import pytest

from omni_core.options import DiffusionRolloutConfig
from omni_core.plugins import ROLLOUTS, registry
from omni_rollout_vllm.options import AdapterForm, Executor, VllmOmniRolloutConfig


def test_it_offers_the_rollout_without_importing_an_engine():
    plugin = registry(ROLLOUTS).get("vllm_omni")

    assert issubclass(plugin.options, DiffusionRolloutConfig)
    assert plugin.target == "omni_rollout_vllm.rollout:VllmOmniRollout"


def test_a_choice_may_be_given_as_its_name():
    found = VllmOmniRolloutConfig(executor="mp", adapter_form="merged")

    assert (found.executor, found.adapter_form) == (Executor.PROCESSES, AdapterForm.MERGED)
    assert isinstance(found.executor, Executor)
    for name in ("executor", "adapter_form", "transport"):
        with pytest.raises(ValueError, match="typo"):
            VllmOmniRolloutConfig(**{name: "typo"})


def test_vllm_finds_its_hooks():
    for group in (
        "vllm.platform_plugins",
        "vllm_omni.platform_plugins",
        "vllm_omni.general_plugins",
    ):
        (point,) = [p for p in entry_points(group=group) if "omni_rollout_vllm" in p.value]
        assert callable(point.load())


def test_the_gpu_extra_pins_one_pair_of_engines():
    extra = {r.partition(";")[0].strip() for r in requires("omni-rollout-vllm") or [] if "gpu" in r}

    assert metadata("omni-rollout-vllm").get_all("Provides-Extra") == ["gpu"]
    assert extra == {"vllm==0.30.0", "vllm-omni==0.30.0"}
