"""Every algorithm of core keeps what the suite for algorithms asks."""

from __future__ import annotations

import pytest

from omni_core.algorithm import Algorithm
from omni_core.algorithms import (
    awm_options,
    dance_grpo_options,
    dgpo_options,
    diffusion_dpo_options,
    diffusion_nft_options,
    distillation_options,
    elbo_options,
    flow_dppo_options,
    grpo_guard_options,
    mix_grpo_options,
    ram_options,
)
from omni_core.algorithms.base_options import NormGuardOptions
from omni_core.algorithms.distillation_options import DistillationOptions, TeacherConfig
from omni_core.choices import (
    DistillationForm,
    ElboForm,
    KLForm,
    OldPolicy,
    RewardProbability,
    StepKind,
    WindowStrategy,
)
from omni_core.options import AlgorithmConfig
from omni_core.plugins import Plugin
from omni_core.testing import AlgorithmSuite


class _Suite(AlgorithmSuite):
    plugin: Plugin
    options: AlgorithmConfig

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        built: Algorithm = self.plugin.build(self.options)
        assert isinstance(self.options, self.plugin.options)
        return built


class TestDanceGRPO(_Suite):
    plugin = dance_grpo_options.plugin
    options = dance_grpo_options.DanceGRPOOptions()


class TestMixGRPO(_Suite):
    plugin = mix_grpo_options.plugin
    options = mix_grpo_options.MixGRPOOptions()


class TestMixGRPORandom(_Suite):
    plugin = mix_grpo_options.plugin
    options = mix_grpo_options.MixGRPOOptions(strategy=WindowStrategy.RANDOM, kind=StepKind.CPS)


class TestGRPOGuard(_Suite):
    plugin = grpo_guard_options.plugin
    options = grpo_guard_options.GRPOGuardOptions(kl_coef=0.1, kl_form=KLForm.EXACT)


class TestGRPOGuardOnCPS(_Suite):
    plugin = grpo_guard_options.plugin
    options = grpo_guard_options.GRPOGuardOptions(kind=StepKind.CPS, window_size=3)


class TestFlowDPPO(_Suite):
    plugin = flow_dppo_options.plugin
    options = flow_dppo_options.FlowDPPOOptions(norm_guard=NormGuardOptions())


class TestDistillation(_Suite):
    plugin = distillation_options.plugin
    options = DistillationOptions(teachers=(TeacherConfig(path="teacher"),))
    group_relative = False


class TestDistillationOfVelocities(TestDistillation):
    options = DistillationOptions(
        form=DistillationForm.VELOCITY,
        teachers=(TeacherConfig(name="a", path="a"), TeacherConfig(name="b", path="b")),
        route="task",
        norm_guard=NormGuardOptions(margin=0.1),
    )


class TestDiffusionNFT(_Suite):
    plugin = diffusion_nft_options.plugin
    options = diffusion_nft_options.DiffusionNFTOptions()


class TestDiffusionNFTOnPolicy(_Suite):
    plugin = diffusion_nft_options.plugin
    options = diffusion_nft_options.DiffusionNFTOptions(
        beta=0.1, old_policy=OldPolicy.COPY, probability=RewardProbability.BINARY, kl_coef=0.0
    )


class TestDiffusionDPO(_Suite):
    plugin = diffusion_dpo_options.plugin
    options = diffusion_dpo_options.DiffusionDPOOptions(norm_guard=NormGuardOptions())


class TestAWM(_Suite):
    plugin = awm_options.plugin
    options = awm_options.AWMOptions(updates_per_rollout=2)


class TestAWMOnPolicy(_Suite):
    plugin = awm_options.plugin
    options = awm_options.AWMOptions(ema_coef=0.0, kl_coef=0.0)


class TestEPG(_Suite):
    plugin = elbo_options.plugin
    options = elbo_options.ElboOptions(form=ElboForm.EPG, old_policy=OldPolicy.RAMP)


class TestPEPG(_Suite):
    plugin = elbo_options.plugin
    options = elbo_options.ElboOptions(updates_per_rollout=2, kl_coef=1e-4)


class TestPAR(_Suite):
    plugin = elbo_options.plugin
    options = elbo_options.ElboOptions(form=ElboForm.PAR, old_policy=OldPolicy.DELAYED_RAMP)


class TestDGPO(_Suite):
    plugin = dgpo_options.plugin
    options = dgpo_options.DGPOOptions(kl_coef=0.01)


class TestRAM(_Suite):
    plugin = ram_options.plugin
    options = ram_options.RAMOptions()
