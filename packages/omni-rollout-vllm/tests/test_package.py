from importlib.metadata import entry_points, metadata, requires

import omni_rollout_vllm


def test_it_offers_no_rollout_yet():
    offered = [p for p in entry_points(group="omni.rollouts") if "omni_rollout_vllm" in p.value]

    assert offered == []
    assert "no plugin is offered yet" in (omni_rollout_vllm.__doc__ or "")


def test_the_gpu_extra_pins_one_pair_of_engines():
    extra = {r.partition(";")[0].strip() for r in requires("omni-rollout-vllm") or [] if "gpu" in r}

    assert metadata("omni-rollout-vllm").get_all("Provides-Extra") == ["gpu"]
    assert extra == {"vllm==0.30.0", "vllm-omni==0.30.0"}
