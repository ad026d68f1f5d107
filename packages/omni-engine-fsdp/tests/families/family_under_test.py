"""What the tests of every family share: a family over its tiny pipeline, and an engine that moved from its start."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import attrs
import diffusers
import torch
from torch import Tensor

from omni_core import plugins
from omni_core.model import NO_GUIDANCE, Conditioner, Denoiser, ModelFamily
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import BatchPlace, RolloutRequest
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
)

PROMPTS = ("a red sign", "blue")
SEEDS = (11, 2**40 + 7)


class AnyCase(Protocol):
    """What a family is read by."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> DiffusionPipelineConfig: ...


@attrs.define(eq=False, slots=False)
class FamilyUnderTest:
    """Each part is read once."""

    case: Any
    path: Path
    steps = 4
    """Of its schedule."""

    def family_of(self, **changes: Any) -> ModelFamily:
        """The family, with fields of the model's config changed."""
        config = DiffusionModelConfig(path=str(self.path), pipeline=self.case.size)
        plugin = plugins.registry(plugins.MODELS).get(self.case.name)
        built: ModelFamily = plugin.build(attrs.evolve(config, **changes))
        return built

    @cached_property
    def family(self) -> ModelFamily:
        return self.family_of()

    @cached_property
    def denoiser(self) -> Denoiser:
        return self.family.load_denoiser(torch.float32)

    @cached_property
    def conditioner(self) -> Conditioner:
        return self.family.load_conditioner(torch.float32)

    @cached_property
    def codec(self) -> Any:
        return self.family.load_codec(torch.float32)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.codec.latent_shapes(self.case.size))

    @cached_property
    def schedule(self) -> FlowMatchSchedule:
        return self.family.schedule(DiffusionSamplingConfig(num_inference_steps=self.steps))

    def noise(self, rows: int = 2, seed: int = 3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(rows, *shape, generator=generator)
            for name, shape in self.shapes.items()
        }

    def stock(self, **keywords: Any) -> Any:
        """The stock pipeline of the folder."""
        kind = getattr(diffusers, self.family.pipeline_classes[0])
        pipeline = kind.from_pretrained(self.path, local_files_only=True, **keywords)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @cached_property
    def pipeline(self) -> Any:
        return self.stock()

    def engine(self) -> PPODiffusersFSDPEngine:
        """An engine with a LoRA of rank 2 and alpha 8 whose factors B are not zero."""
        model = DiffusionModelConfig(
            path=str(self.path), pipeline=self.case.size, lora=LoRAConfig(rank=2, alpha=8.0)
        )
        built = PPODiffusersFSDPEngine(
            model,
            FSDPEngineConfig(device="cpu", micro_batch_size=4),
            OptimizerConfig(lr=1e-2),
            CheckpointConfig(),
        )
        built.initialize()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in built.trained().items():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.1
                local: Any = parameter
                local = local.to_local() if hasattr(parameter, "to_local") else local
                local.detach().copy_(drawn)
        return built


def log_probs_beside_and_alone(
    engine: PPODiffusersFSDPEngine, requests: list[RolloutRequest]
) -> tuple[Tensor, Tensor]:
    """Score the first request's samples twice: as they were drawn beside the others, and by themselves.

    Returns:
        The rollout's log-probs of one batch of all, and those of the same latents in a batch of their own,
        their prompt encoded by itself.
    """
    first = requests[0]
    rows = sum(len(request.samples) for request in requests)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=rows), engine=engine)
    drawn, *_ = rollout.generate(requests, decode=False)
    (apart,) = rollout.generate([first], decode=False)
    count = drawn.rows
    alone = attrs.evolve(
        drawn,
        conditioning=apart.conditioning,
        places=tuple(BatchPlace("alone", place, count) for place in range(count)),
    )
    return drawn.log_probs, engine.replay(alone)


class SeenTokenizer:
    """A tokenizer that keeps what it was asked to cut off."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.seen: list[tuple[int, int]] = []
        """Tokens of a text before it is cut, and how many are kept."""

    def __call__(self, texts: Any, **options: Any) -> Any:
        if options.get("truncation"):
            for text in [texts] if isinstance(texts, str) else texts:
                self.seen.append((len(self.tokenizer(text).input_ids), options["max_length"]))
        return self.tokenizer(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def counts_of_stock(conditioner: Any, prompts: list[str]) -> list[tuple[int, int]]:
    """Return tokens and limit of each prompt, as the stock pipeline's longest tokenizer is asked."""
    found: list[list[tuple[int, int]]] = []
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        own = getattr(conditioner.pipeline, name, None)
        if own is not None:
            seen = SeenTokenizer(own)
            setattr(conditioner.pipeline, name, seen)
            conditioner.encode(prompts, negative_prompt="", guidance=NO_GUIDANCE)
            setattr(conditioner.pipeline, name, own)
            found.append(seen.seen[: len(prompts)])
    return found[-1]
