"""The engine keeps what every engine keeps (`omni_core.testing`), at one rank, in both precisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from omni_core.choices import StepKind
from omni_core.engine import BaseEngine
from omni_core.options import DiffusionSamplingConfig, DType, LoRAConfig, OptimizerConfig
from omni_core.rollout import BaseRollout
from omni_core.testing.engine_suite import EngineFactory, EngineSuite, RolloutFactory
from omni_core.trajectory import SamplingSpec
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, PPODiffusersFSDPEngine


class TestPPODiffusersFSDPEngine(EngineSuite):
    dtype = DType.FLOAT32
    lora: LoRAConfig | None = LoRAConfig(rank=2, alpha=8.0)
    layout: ClassVar[Mapping[str, Any]] = {}
    """More fields of the engine's options."""
    untouched = tuple(
        # The text stream ends in the last block, whose queries of the text are used by nobody.
        f"transformer.transformer_blocks.1.attn.add_q_proj.lora_{factor}.weight"
        for factor in "AB"
    )

    @pytest.fixture
    def make_engine(
        self, build_engine: Callable[..., PPODiffusersFSDPEngine], tiny_sd3: Path
    ) -> EngineFactory:
        def make(
            *, micro_batch_size: int = 8, optimizer: OptimizerConfig | None = None
        ) -> BaseEngine:
            return build_engine(
                tiny_sd3,
                dtype=self.dtype,
                lora=self.lora,
                micro_batch_size=micro_batch_size,
                optimizer=optimizer,
                **self.layout,
            )

        return make

    @pytest.fixture
    def make_rollout(self) -> RolloutFactory:
        def make(engine: BaseEngine) -> BaseRollout:
            return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)

        return make

    @pytest.fixture
    def sampling(self, engine: BaseEngine, make_rollout: RolloutFactory) -> SamplingSpec:
        config = DiffusionSamplingConfig(num_inference_steps=4, guidance_scale=3.0)
        return SamplingSpec(
            sigmas=make_rollout(engine).schedule(config).values(),
            guidance_scale=config.guidance_scale,
            height=16,
            width=16,
            max_sequence_length=8,
            kind=StepKind.SDE,
            noise_level=0.7,
        )


class TestPPODiffusersFSDPEngineInFloat64(TestPPODiffusersFSDPEngine):
    dtype = DType.FLOAT64
    gradient_bound = 1e-12


class TestPPODiffusersFSDPEngineOfAllWeights(TestPPODiffusersFSDPEngine):
    lora = None
    untouched = tuple(
        f"transformer.transformer_blocks.1.attn.{name}"
        for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
    )
