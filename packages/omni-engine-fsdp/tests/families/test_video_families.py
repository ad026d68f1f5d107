"""Wan and LTX-2 beside the stock pipelines of their folders: several experts, modalities and scales.

WanPipeline's own solver looks back at the step before, so here it is given Euler steps on the solver's
sigmas. Of LTX2Pipeline's guidance, what the family leaves out is switched off. Letters: B rows, T steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import diffusers
import pytest
import torch
from family_under_test import (
    PROMPTS,
    SEEDS,
    FamilyUnderTest,
    counts_of_stock,
    log_probs_beside_and_alone,
)
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.losses import ConfiguredLoss
from omni_core.model import NO_GUIDANCE, Guidance, Step
from omni_core.options import (
    DiffusionLossConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
)
from omni_core.testing.samples import requests_for, train_batch
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    PPODiffusersFSDPEngine,
    lora,
)
from omni_engine_fsdp.sampling import SampledBatch, SamplingBatch, SamplingRule, sample

STEPS = 5
NEGATIVE = "blue photo"
SIGMAS = (0.97826087, 0.68181819)
TWO_SCALES = Guidance(scale=4.0, second_scale=2.5)


@attrs.frozen(kw_only=True)
class VideoCase:
    """What differs between the two."""

    name: str
    size: DiffusionPipelineConfig
    blocks: tuple[str, ...]
    time_module: str


CASES = (
    VideoCase(
        name="wan",
        size=DiffusionPipelineConfig(height=16, width=32, max_sequence_length=12, num_frames=3),
        blocks=("WanTransformerBlock",) * 2,
        time_module="condition_embedder.timesteps_proj",
    ),
    VideoCase(
        name="ltx2",
        size=DiffusionPipelineConfig(
            height=32, width=64, max_sequence_length=12, num_frames=5, frame_rate=25.0
        ),
        blocks=("LTX2VideoTransformerBlock",) * 2,
        time_module="time_embed.emb.time_proj",
    ),
)


class Euler(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Steps on given sigmas, and says what they came to; LTX-2 makes a copy for its sound."""

    given: ClassVar[tuple[float, ...]] = ()
    seen: ClassVar[list[Tensor]] = []
    """Of all copies."""

    def set_timesteps(
        self, steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any
    ) -> None:
        del steps, device, sigmas
        super().set_timesteps(sigmas=list(self.given))

    def step(self, *args: Any, **keywords: Any) -> Any:
        result = super().step(*args, **keywords)
        self.seen.append(result[0])
        return result


class Loaded(FamilyUnderTest):
    """One of the two, and its stock pipeline."""

    steps = STEPS

    def encode(self, guidance: Guidance) -> Any:
        return self.conditioner.encode(PROMPTS, negative_prompt=NEGATIVE, guidance=guidance)

    def sampled(self, guidance: Guidance, kind: StepKind = StepKind.ODE) -> SampledBatch:
        windows = [() if kind is StepKind.ODE else tuple(range(STEPS - 1))] * len(SEEDS)
        return sample(
            self.denoiser,
            SamplingBatch(seeds=SEEDS, windows=windows, conditioning=self.encode(guidance)),
            SamplingRule(
                schedule=self.schedule,
                guidance=guidance,
                kind=kind,
                noise_level=0.0 if kind is StepKind.ODE else 0.7,
            ),
            shapes=self.shapes,
            device=torch.device("cpu"),
        )

    def run_stock(self, guidance: Guidance, **more: Any) -> tuple[Any, list[Tensor]]:
        """The stock pipeline on our sigmas: what it returns, and the states after each step (and modality)."""
        own = self.pipeline.scheduler
        Euler.given, Euler.seen = self.schedule.values()[:-1], []
        self.pipeline.scheduler = Euler(shift=1.0)
        try:
            call = self.family.stock_call(
                DiffusionSamplingConfig(
                    num_inference_steps=STEPS,
                    guidance_scale=guidance.scale,
                    guidance_scale_2=guidance.second_scale,
                )
            )
            found = self.pipeline(
                prompt=list(PROMPTS),
                generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
                return_dict=False,
                **{
                    **call,
                    "negative_prompt": [NEGATIVE] * len(PROMPTS),
                    "output_type": "latent",
                    **more,
                },
            )
        finally:
            self.pipeline.scheduler = own
        return found, Euler.seen

    def shaped(self, state: Tensor, name: str) -> Tensor:
        """A state of the stock pipeline as we hold it."""
        shape = (len(state), *self.shapes[name])
        if state.shape == shape:
            return state
        if name == "audio":
            return state.reshape(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        return state.transpose(1, 2).reshape(shape)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def video(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path]) -> Loaded:
    return Loaded(request.param, tiny_path(request.param.name))


def step_at(*sigmas: float) -> Step:
    return Step(index=torch.arange(len(sigmas)), sigma=torch.tensor(sigmas))


def test_ode_latents_equal_the_stock_pipelines_on_the_same_sigmas(video: Loaded) -> None:
    if video.case.name == "wan":
        assert {video.denoiser.route(step, video.schedule) for step in range(STEPS)} == {
            "transformer",
            "transformer_2",
        }
    for guidance in (NO_GUIDANCE, TWO_SCALES):
        _, seen = video.run_stock(guidance)
        found = video.sampled(guidance).latents
        names = list(video.shapes)
        assert len(seen) == STEPS * len(names)
        for place, name in enumerate(names):
            expected = video.shaped(seen[place - len(names)], name)
            torch.testing.assert_close(found[name][:, -1], expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_velocity_equals_stock_bit_for_bit_branch_by_branch(video: Loaded) -> None:
    outputs: list[Any] = []
    hooks = [
        getattr(video.pipeline, name).register_forward_hook(lambda _, __, out: outputs.append(out))
        for name in video.denoiser.experts
    ]
    _, seen = video.run_stock(NO_GUIDANCE)
    for hook in hooks:
        hook.remove()
    names = list(video.shapes)
    conditioning = video.encode(NO_GUIDANCE)
    for step in range(1, STEPS):
        states = seen[(step - 1) * len(names) : step * len(names)]
        state = {n: video.shaped(v, n) for n, v in zip(names, states, strict=True)}
        rows = torch.full((2,), step)
        found = video.denoiser.velocity(
            state,
            Step(index=rows, sigma=video.schedule.at(rows)[0]),
            conditioning,
            NO_GUIDANCE,
        )
        for name, expected in zip(names, outputs[step], strict=True):
            assert torch.equal(found[name], video.shaped(expected, name)), name


@torch.no_grad()
def test_guided_branches_as_one_batch_equal_each_branch_alone(video: Loaded) -> None:
    conditioning = video.encode(TWO_SCALES)
    negative = attrs.evolve(
        conditioning,
        **{
            field.name.removeprefix("negative_"): getattr(conditioning, field.name)
            for field in attrs.fields(type(conditioning))
            if field.name.startswith("negative_")
        },
    )
    latents = video.noise()
    for sigmas in ((0.99, 0.9), (0.5, 0.2)):
        step = step_at(*sigmas)
        found = video.denoiser.velocity(latents, step, conditioning, TWO_SCALES)
        prompt, other = (
            video.denoiser.velocity(latents, step, each, NO_GUIDANCE)
            for each in (conditioning, negative)
        )
        for name, value in found.items():
            low = name == "audio" or (video.case.name == "wan" and sigmas[0] < 0.875)
            scale = 2.5 if low else 4.0
            assert (prompt[name] - other[name]).abs().max() > 1e-4
            expected = other[name] + scale * (prompt[name] - other[name])
            torch.testing.assert_close(value, expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_case_1_a_bf16_model_is_conditioned_on_the_float32_timestep(video: Loaded) -> None:
    denoiser: Any = video.family_of(dtype=DType.BFLOAT16).load_denoiser(torch.bfloat16)
    seen: dict[str, Tensor] = {}
    for name, expert in denoiser.experts.items():
        expert.get_submodule(video.case.time_module).register_forward_hook(
            lambda _, inputs, out, name=name: seen.__setitem__(name, inputs[0])
        )
    conditioning = video.encode(NO_GUIDANCE)
    for row, sigma in enumerate(SIGMAS):
        index = torch.tensor([row])
        latents = {name: value[index] for name, value in video.noise().items()}
        found = denoiser.velocity(latents, step_at(sigma), conditioning.select(index), NO_GUIDANCE)
        timestep = seen[denoiser.expert_at(sigma)]
        assert timestep.dtype == torch.float32
        torch.testing.assert_close(timestep, torch.tensor([sigma * 1000]), rtol=0.0, atol=1e-3)
        assert all(value.dtype == torch.float32 for value in found.values())


@torch.no_grad()
def test_case_9_text_beside_it_changes_nothing_and_its_length_is_the_configured(
    video: Loaded,
) -> None:
    """CASES 9: 3 and 40 characters in one batch."""
    both, alone = (
        video.conditioner.encode(prompts, negative_prompt="", guidance=NO_GUIDANCE)
        for prompts in (("abc", "a sign " * 6), ("abc",))
    )
    assert (
        both.prompt_embeds.shape[1:] == alone.prompt_embeds.shape[1:]
        if (video.case.name == "wan")
        else both.mask.shape == (2, 12)
    )
    first = torch.tensor([0])
    latents = video.noise()
    together = video.denoiser.velocity(latents, step_at(0.9, 0.9), both, NO_GUIDANCE)
    found = video.denoiser.velocity(
        {name: value[first] for name, value in latents.items()},
        step_at(0.9),
        alone,
        NO_GUIDANCE,
    )
    for name, value in found.items():
        torch.testing.assert_close(together[name][first], value, rtol=0.0, atol=1e-5)


def test_prompts_are_counted_as_the_encoder_reads_them(video: Loaded) -> None:
    prompts = ["abc", "  a sign " * 6]
    found = video.family.prompt_lengths(prompts)
    assert found is not None
    assert [length.cut for length in found] == [False, True]
    expected = counts_of_stock(video.conditioner, prompts)
    assert [(length.tokens, length.limit) for length in found] == expected


def test_lora_targets_and_shard_units_are_in_every_expert(video: Loaded) -> None:
    for name, expert in video.denoiser.experts.items():
        lora.check_targets(expert, video.denoiser.lora_targets, name=name)
        units = video.denoiser.shard_units(expert)
        assert tuple(type(unit).__name__ for unit in units) == video.case.blocks
    assert tuple(video.denoiser.experts) == video.family.expert_names
    assert video.family.lora_targets == video.denoiser.lora_targets
    assert tuple(video.shapes) == video.family.modalities


def test_decoded_media_are_those_of_the_stock_pipeline(video: Loaded) -> None:
    stock, _ = video.run_stock(NO_GUIDANCE, output_type="pt")
    final = {name: value[:, -1] for name, value in video.sampled(NO_GUIDANCE).latents.items()}
    media = video.codec.decode(final)
    frames = (stock[0].float() * 255.0).round().permute(0, 1, 3, 4, 2)
    assert media.video.shape == frames.shape
    assert (media.video.float() - frames).abs().max() <= 1  # latents differ by rounding
    assert media.frame_rate == video.case.size.frame_rate
    if video.case.name == "ltx2":
        torch.testing.assert_close(media.audio, stock[1].float(), rtol=0.0, atol=1e-4)
        assert media.audio_rate == 16000


def test_sizes_that_do_not_fit_are_named(video: Loaded) -> None:
    size = attrs.evolve(video.case.size, num_frames=4, height=video.case.size.height + 1)
    with pytest.raises(ValueError, match=r"height \d+ does not fit.*num_frames 4 .*: 3 or 5"):
        video.codec.latent_shapes(size)


# -- in the engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(video: Loaded) -> PPODiffusersFSDPEngine:
    """Of the family, moved from its start."""
    return video.engine()


def factors(engine: PPODiffusersFSDPEngine) -> dict[str, Tensor]:
    """Of every adapter, as they are now."""
    return {
        name: value.clone() for name, value in engine.get_per_tensor_param() if "lora_B" in name
    }


def spec_of(video: Loaded) -> SamplingSpec:
    """Of two scales."""
    size = video.case.size
    return SamplingSpec(
        sigmas=video.schedule.values(),
        guidance_scale=3.0,
        guidance_scale_2=2.0,
        height=size.height,
        width=size.width,
        max_sequence_length=size.max_sequence_length,
        num_frames=size.num_frames,
        frame_rate=size.frame_rate,
        kind=StepKind.SDE,
        noise_level=0.7,
    )


def test_case_32_case_7_both_scales_are_echoed_replay_is_exact_and_every_expert_learns(
    video: Loaded, engine: PPODiffusersFSDPEngine
) -> None:
    """CASES 32 and 7: two scales used as asked, log-probs replayed bit for bit."""
    spec, before = spec_of(video), factors(engine)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=engine)
    trajectory = Trajectory.concat(rollout.generate(requests_for(spec, ["a sign"])))
    assert trajectory.effective == spec
    assert trajectory.log_probs.isfinite().all()
    with engine.eval_mode():
        assert torch.equal(engine.replay(trajectory), trajectory.log_probs)
    options = FlowGRPOOptions(clip_ratio=1e-2)
    loss = ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=options))
    engine.train_batch(train_batch(trajectory), loss)
    moved = {
        name.partition(".")[0]
        for name, value in factors(engine).items()
        if not torch.equal(value, before[name])
    }
    assert moved == set(engine.denoiser.experts)


def test_case_32_no_guidance_is_reported_as_such(
    video: Loaded, engine: PPODiffusersFSDPEngine
) -> None:
    """CASES 32: 1.0 asked, 1.0 used, one branch."""
    spec = attrs.evolve(spec_of(video), guidance_scale=1.0, guidance_scale_2=None)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=engine)
    (trajectory,) = rollout.generate(requests_for(spec, ["a sign"]), decode=False)
    assert trajectory.effective == spec
    assert engine.denoiser.branches(Guidance.of(trajectory.effective)) == 1


def test_case_9_log_probs_do_not_depend_on_the_text_of_other_rows(
    video: Loaded, engine: PPODiffusersFSDPEngine
) -> None:
    """CASES 9: 3 and 40 characters in one batch, guided."""
    beside, alone = log_probs_beside_and_alone(
        engine, requests_for(spec_of(video), ["abc", "a sign " * 6])
    )
    assert beside.isfinite().all()
    torch.testing.assert_close(alone, beside, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_case_22_case_25_the_exported_lora_loads_in_the_stock_pipeline(
    video: Loaded, engine: PPODiffusersFSDPEngine, tmp_path: Path
) -> None:
    """CASES 22 and 25, both experts: every name is bound, scale 4.0, and the trainer's own velocity."""
    engine.export_adapter(tmp_path)
    pipeline = video.stock()
    pipeline.load_lora_weights(tmp_path)
    if video.case.name == "wan":
        pipeline.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    conditioning, latents = video.encode(NO_GUIDANCE), video.noise()
    for sigma in (0.95, 0.4):
        step = step_at(sigma, sigma)
        with engine.eval_mode():
            found = engine.denoiser.velocity(latents, step, conditioning, NO_GUIDANCE)
        name = engine.denoiser.expert_at(sigma)
        loaded = getattr(pipeline, name)
        scales = {
            scale
            for module in loaded.modules()
            for scale in getattr(module, "scaling", {}).values()
        }
        assert scales == {4.0}
        folder = tmp_path / ("" if name == "transformer" else name)
        assert written_names(folder, name) == bound_names(loaded)
        base = video.denoiser.velocity(latents, step, conditioning, NO_GUIDANCE)
        theirs = _with_transformer(video.denoiser, name, loaded).velocity(
            latents, step, conditioning, NO_GUIDANCE
        )
        for modality, value in found.items():
            torch.testing.assert_close(theirs[modality], value, rtol=0.0, atol=1e-5)
            assert (base[modality] - value).abs().max() > 1e-5


def written_names(folder: Path, expert: str) -> set[str]:
    """Of an exported file, as the expert's module names them."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        names: list[str] = opened.keys()
        return {re.sub(rf"^({expert}|transformer)\.", "", name) for name in names}


def bound_names(module: torch.nn.Module) -> set[str]:
    """Factors of the adapter that a stock module holds."""
    return {
        f"{name}.lora_{side}.weight"
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
        for side in "AB"
    }


def _with_transformer(denoiser: Any, name: str, module: Any) -> Any:
    other = object.__new__(type(denoiser))
    other.__dict__.update(denoiser.__dict__)
    other.__dict__["transformer" if name == "transformer" else "low_noise"] = module
    return other


# -- Wan alone -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wan(tiny_path: Callable[[str], Path]) -> Loaded:
    return Loaded(CASES[0], tiny_path("wan"))


def test_the_first_sigma_is_unipcs_and_guarded(wan: Loaded) -> None:
    wan.pipeline.scheduler.set_timesteps(STEPS)
    assert torch.equal(wan.schedule.sigmas, wan.pipeline.scheduler.sigmas)
    assert wan.schedule.values()[0] == pytest.approx(0.999999, abs=1e-7)
    assert wan.schedule.sigma_guard == wan.schedule.sigmas[1]
    found = wan.sampled(NO_GUIDANCE, StepKind.SDE)
    assert found.log_probs[:, : STEPS - 1].isfinite().all()
    assert (found.latents["video"][:, 1] - found.latents["video"][:, 0]).abs().max() < 10


def test_rows_of_two_experts_are_refused(wan: Loaded) -> None:
    with pytest.raises(ValueError, match="several experts"):
        wan.denoiser.velocity(wan.noise(), step_at(0.95, 0.3), wan.encode(NO_GUIDANCE), NO_GUIDANCE)


def test_a_second_scale_alone_is_refused(wan: Loaded) -> None:
    with pytest.raises(ValueError, match=r"guidance_scale_2 3\.0: WanPipeline guides neither"):
        wan.encode(Guidance(scale=1.0, second_scale=3.0))


def test_a_pipeline_of_one_transformer_is_served(tmp_path: Path) -> None:
    from tiny_models import build_tiny

    one = Loaded(CASES[0], build_tiny("wan", tmp_path / "wan21", boundary_ratio=None))
    assert list(one.denoiser.experts) == ["transformer"]
    found = one.denoiser.velocity(
        one.noise(), step_at(0.95, 0.3), one.encode(NO_GUIDANCE), NO_GUIDANCE
    )
    assert found["video"].shape == (2, 4, 2, 4, 8)
