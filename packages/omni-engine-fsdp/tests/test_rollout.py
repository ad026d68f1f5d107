"""Engine-side rollout over a stand-in engine: no FSDP, no LoRA, one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from omni_core.choices import StepKind
from omni_core.model import Guidance, ModelFamily
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
)
from omni_core.rollout import RolloutState, RolloutStateError, WeightUpdate
from omni_core.seeds import initial_noise, sample_seed
from omni_core.trajectory import BatchPlace, RolloutRequest, SampleRecord, SamplingSpec, Trajectory
from omni_engine_fsdp.families.sd3 import SD3Conditioning, SD3Family
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout

STEPS = 5
WINDOW = (0, 1, 2, 3)


class StandIn:
    """What EngineRollout uses of an engine."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family
        self.model_config = family.config
        self.denoiser = family.load_denoiser(torch.float32)
        self.device = torch.device("cpu")
        self.mesh = SimpleNamespace(group=None, together=None)
        self.weight_version = 3
        self.entered: list[str] = []

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.entered.append("eval")
        yield

    @contextlib.contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        if name not in ("default", "old"):
            raise ValueError(f"no adapter named {name!r}; there are: default, old")
        self.entered.append(name)
        yield

    def get_data_parallel_rank(self) -> int:
        return 0


@pytest.fixture(scope="module")
def engine(tiny_sd3: Path) -> StandIn:
    pipeline = DiffusionPipelineConfig(height=16, width=16, max_sequence_length=16)
    return StandIn(SD3Family(DiffusionModelConfig(path=str(tiny_sd3), pipeline=pipeline)))


@pytest.fixture
def rollout(engine: StandIn) -> EngineRollout:
    return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)


@pytest.fixture(scope="module")
def spec(engine: StandIn) -> SamplingSpec:
    sampling = DiffusionSamplingConfig(num_inference_steps=STEPS)
    return SamplingSpec(
        sigmas=engine.family.schedule(sampling).values(),
        guidance_scale=2.5,
        height=16,
        width=16,
        max_sequence_length=16,
        kind=StepKind.SDE,
        noise_level=0.7,
    )


def seed_of(row: str, k: int, *, step: int = 0) -> int:
    return sample_seed(purpose="rollout", base_seed=0, step=step, row_id=row, occurrence=0, k=k)


def request(
    spec: SamplingSpec, group: str, ks: range, prompt: str = "a red sign", **changes: Any
) -> RolloutRequest:
    samples = tuple(
        SampleRecord(group_id=group, row_id=group, k=k, seed=seed_of(group, k), prompt=prompt)
        for k in ks
    )
    return RolloutRequest(**{"samples": samples, "sampling": spec, "window": WINDOW, **changes})


def final(trajectory: Trajectory) -> torch.Tensor:
    return trajectory.latents["image"][:, -1]


# -- what comes back ------------------------------------------------------------------------------


def test_one_trajectory_for_each_request(rollout: EngineRollout, spec: SamplingSpec) -> None:
    requests = [
        request(spec, "g0", range(3)),
        request(spec, "g1", range(3), 'photo of "42"', window=(1, 2)),
    ]
    first, second = rollout.generate(requests)
    assert first.latents["image"].shape == (3, STEPS + 1, 8, 4, 4)
    assert first.latents["image"].dtype == torch.float32
    assert first.step_indices.tolist() == [list(WINDOW)] * 3
    assert first.log_probs.shape == (3, 4)
    assert first.log_probs.dtype == torch.float32
    assert second.step_indices.tolist() == [[1, 2]] * 3
    assert second.log_probs.isfinite().all()
    assert first.media is not None
    assert first.media.image is not None
    assert first.media.image.shape == (3, 16, 16, 3)
    assert first.records == requests[0].samples
    assert first.conditioning.rows == 1
    assert first.prompt_index.tolist() == [0, 0, 0]
    assert first.effective == spec
    assert (first.adapter, first.weight_version) == ("default", 3)
    # Batches of 4 span requests: places say where each row was denoised.
    assert first.places == tuple(BatchPlace("0/3/0", place, 4) for place in range(3))
    assert second.places == (
        BatchPlace("0/3/0", 3, 4),
        BatchPlace("0/3/1", 0, 2),
        BatchPlace("0/3/1", 1, 2),
    )


def test_batch_names_are_never_used_again(rollout: EngineRollout, spec: SamplingSpec) -> None:
    names = [
        place.batch
        for _ in range(2)
        for trajectory in rollout.generate([request(spec, "g", range(6))], decode=False)
        for place in trajectory.places
    ]
    assert list(dict.fromkeys(names)) == ["0/3/0", "0/3/1", "0/3/2", "0/3/3"]


def test_without_decoding_there_is_no_media(rollout: EngineRollout, spec: SamplingSpec) -> None:
    (found,) = rollout.generate([request(spec, "g", range(2))], decode=False)
    assert found.media is None


def test_tensors_are_owned(rollout: EngineRollout, spec: SamplingSpec) -> None:
    found = rollout.generate([request(spec, f"g{n}", range(2)) for n in range(2)])
    for trajectory in found:
        for tensor in (
            trajectory.latents["image"],
            trajectory.log_probs,
            trajectory.step_indices,
            trajectory.conditioning.prompt_embeds,  # type: ignore[attr-defined]
            trajectory.media.image,  # type: ignore[union-attr]
        ):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert not tensor.is_inference()


def test_rows_are_sampled_in_eval_mode_with_the_requests_adapter(
    rollout: EngineRollout, engine: StandIn, spec: SamplingSpec
) -> None:
    requests = [request(spec, "g0", range(1)), request(spec, "g1", range(1), adapter="old")]
    handle = rollout.submit(requests)
    engine.entered.clear()
    found = []
    while not rollout.done(handle):
        found += rollout.poll(handle)
    assert engine.entered == ["eval", "default", "eval", "old"]  # adapters never share a batch
    assert [t.adapter for t in found] == ["default", "old"]


def test_prompts_are_encoded_once_a_submit(
    rollout: EngineRollout, spec: SamplingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[str]] = []
    original = rollout.conditioner.encode

    def counting(prompts: list[str], **keywords: Any) -> Any:
        encoded.append(list(prompts))
        return original(prompts, **keywords)

    monkeypatch.setattr(rollout.conditioner, "encode", counting)
    prompts = ["a", "blue", "a", "red", "of", "the", "sign"]
    rollout.generate([request(spec, f"g{n}", range(2), p) for n, p in enumerate(prompts)])
    assert encoded == [["a", "blue", "red", "of"], ["the", "sign"]]  # at most a batch at a time


def test_case_32_guidance_1_is_reported_as_1_and_takes_one_branch(
    rollout: EngineRollout, engine: StandIn, spec: SamplingSpec
) -> None:
    sizes: list[int] = []
    transformer: Any = engine.denoiser.experts["transformer"]
    hook = transformer.register_forward_hook(
        lambda *call: sizes.append(len(call[-1][0])), with_kwargs=False
    )
    for scale, branches in ((1.0, 1), (2.5, 2)):
        sizes.clear()
        asked = attrs.evolve(spec, guidance_scale=scale)
        (found,) = rollout.generate([request(asked, "g", range(2))])
        assert found.effective.guidance_scale == scale
        assert found.effective.difference(asked) is None
        assert sizes == [2 * branches] * STEPS
        assert isinstance(found.conditioning, SD3Conditioning)
        assert (found.conditioning.negative_pooled is None) == (scale == 1.0)
    hook.remove()


def test_ode_pictures_are_the_stock_pipelines(
    rollout: EngineRollout, spec: SamplingSpec, tiny_sd3: Path
) -> None:
    asked = attrs.evolve(spec, kind=StepKind.ODE, noise_level=0.0, negative_prompt="blue")
    (found,) = rollout.generate([request(asked, "g", range(3), window=())])
    assert found.log_probs.shape == (3, 0)
    assert found.step_indices.shape == (3, 0)
    stock: Any = StableDiffusion3Pipeline
    pipeline = stock.from_pretrained(tiny_sd3, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        ["a red sign"] * 3,
        negative_prompt=["blue"] * 3,
        height=16,
        width=16,
        max_sequence_length=16,
        num_inference_steps=STEPS,
        guidance_scale=2.5,
        generator=[torch.Generator().manual_seed(seed_of("g", k)) for k in range(3)],
    ).images
    assert found.media is not None
    assert found.media.image is not None
    expected = np.stack([np.asarray(picture) for picture in pictures]).astype(int)
    assert np.abs(found.media.image.numpy().astype(int) - expected).max() <= 1


# -- seeds ----------------------------------------------------------------------------------------


def test_case_17_rows_start_from_their_own_seeds(
    rollout: EngineRollout, engine: StandIn, spec: SamplingSpec
) -> None:
    requests = [request(spec, f"g{n}", range(3)) for n in range(2)]
    whole = rollout.generate(requests, decode=False)
    parts = rollout.generate([p for r in requests for p in r.split(2)], decode=False)
    seeds = {record.seed for t in whole for record in t.records}
    assert len(seeds) == 6
    starts = torch.cat([t.latents["image"][:, 0] for t in whole])
    expected = [initial_noise(r.seed, {"image": (8, 4, 4)}) for t in whole for r in t.records]
    assert torch.equal(starts, torch.cat([noise["image"] for noise in expected]))
    again = torch.cat([t.latents["image"][:, 0] for t in parts])
    assert torch.equal(starts, again)


def test_case_18_a_sample_does_not_depend_on_its_batch(
    rollout: EngineRollout, spec: SamplingSpec
) -> None:
    wanted = request(spec, "g7", range(3, 4), "the blue sign")
    (alone,) = rollout.generate([wanted])
    others = [request(spec, f"g{n}", range(3), window=(n,)) for n in range(2)]
    among = rollout.generate([others[0], wanted, others[1]])[1]
    assert [p.place for p in among.places] != [p.place for p in alone.places]
    assert torch.equal(alone.latents["image"][:, 0], among.latents["image"][:, 0])
    torch.testing.assert_close(final(alone), final(among), rtol=0.0, atol=1e-4)
    torch.testing.assert_close(alone.log_probs, among.log_probs, rtol=0.0, atol=1e-5)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "changes", "message"),
    [
        ({}, {"window": tuple(range(5))}, r"the widest that fits is \[0, 4\)"),  # case 6
        ({}, {"window": (3, 5)}, r"window \[3, 6\) leaves the 5 steps"),
        ({}, {"window": (2, 1)}, r"steps must ascend, got \[2, 1\]"),
        ({"height": 20}, {}, "height 20 does not fit: .*nearest: 16 or 24"),
        ({"max_sequence_length": 8}, {}, "max_sequence_length 8: the model is run with 16"),
        ({"kind": "euler"}, {}, "unknown StepKind 'euler'; known are: sde, cps, dance_sde, ode"),
        ({"kind": StepKind.ODE}, {}, "'ode' at noise level 0.7 is deterministic"),  # case 3
        ({"noise_level": 0.0}, {}, "'sde' at noise level 0.0 is deterministic"),
        ({"noise_level": -1.0}, {}, "noise_level must be a number of at least 0"),
        ({"sigmas": (1.0, 0.9, 0.9, 0.5, 0.0)}, {}, "not strictly decreasing"),  # case 2
        ({"num_frames": 2}, {}, "num_frames 2"),
        ({}, {"adapter": "ema"}, "no adapter named 'ema'; there are: default, old"),
    ],
)
def test_what_cannot_be_served_is_refused_by_group(
    rollout: EngineRollout,
    spec: SamplingSpec,
    sampling: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    bad = request(attrs.evolve(spec, **sampling), "g1", range(2), **changes)
    with pytest.raises(ValueError, match=f"group 'g1': .*{message}"):
        rollout.submit([request(spec, "g0", range(2)), bad])


def test_a_sample_that_is_asked_for_twice_is_refused(
    rollout: EngineRollout, spec: SamplingSpec
) -> None:
    with pytest.raises(ValueError, match=r"group 'g': samples \[0, 1\] were requested more"):
        rollout.submit([request(spec, "g", range(2))] * 2)


def test_another_weight_version_is_refused(rollout: EngineRollout, spec: SamplingSpec) -> None:
    rollout.submit([request(spec, "g", range(2), weight_version=3)])
    with pytest.raises(ValueError, match="'g': weight version 4 was asked for; the engine is at 3"):
        rollout.submit([request(spec, "g", range(2), weight_version=4)])


def test_weights_may_not_change_in_the_middle(
    rollout: EngineRollout, engine: StandIn, spec: SamplingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = rollout.submit([request(spec, "g", range(6))])
    assert rollout.poll(handle) == []
    monkeypatch.setattr(engine, "weight_version", 4)
    with pytest.raises(RolloutStateError, match="went from version 3 to 4 while"):
        rollout.poll(handle)


# -- handles and states ---------------------------------------------------------------------------


def test_polling_runs_one_batch_at_a_time(rollout: EngineRollout, spec: SamplingSpec) -> None:
    handle = rollout.submit([request(spec, f"g{n}", range(2)) for n in range(3)])
    assert not rollout.done(handle)
    assert [t.records[0].group_id for t in rollout.poll(handle)] == ["g0", "g1"]
    assert not rollout.done(handle)
    assert [t.records[0].group_id for t in rollout.poll(handle)] == ["g2"]
    assert rollout.done(handle)
    with pytest.raises(KeyError, match="drained"):
        rollout.poll(handle)


def test_a_cancelled_handle_is_gone(rollout: EngineRollout, spec: SamplingSpec) -> None:
    handle = rollout.submit([request(spec, "g", range(6))])
    rollout.poll(handle)
    rollout.cancel(handle)
    assert rollout.done(handle)
    with pytest.raises(KeyError, match="cancelled"):
        rollout.poll(handle)
    with pytest.raises(KeyError):
        rollout.cancel(handle)


def test_nothing_to_sample_is_done_at_once(rollout: EngineRollout) -> None:
    handle = rollout.submit([])
    assert rollout.done(handle)
    assert rollout.generate([]) == []


def test_a_paused_rollout_waits(rollout: EngineRollout, spec: SamplingSpec) -> None:
    handle = rollout.submit([request(spec, "g", range(2))])
    rollout.pause()
    assert rollout.state is RolloutState.PAUSED
    assert rollout.poll(handle) == []
    assert not rollout.done(handle)
    rollout.resume()
    assert rollout.state is RolloutState.READY
    assert len(rollout.poll(handle)) == 1


def test_a_push_is_refused_because_the_weights_are_the_engines(rollout: EngineRollout) -> None:
    rollout.pause()
    with pytest.raises(RolloutStateError, match=r"trained module itself .*nothing to push"):
        rollout.update(WeightUpdate(version=4, tensors={}))
    with pytest.raises(RolloutStateError, match="no memory of its own"):
        rollout.sleep()


def test_it_says_what_it_samples_with(rollout: EngineRollout, engine: StandIn) -> None:
    sampling = DiffusionSamplingConfig(num_inference_steps=7)
    assert rollout.schedule(sampling).difference(engine.family.schedule(sampling)) is None
    assert rollout.latent_shapes() == {"image": (8, 4, 4)}
    assert rollout.weight_version == 3
    found = rollout.encode(["a", "blue"], guidance=Guidance(scale=1.0))
    assert found.rows == 2
    with pytest.raises(ValueError, match="no prompt to encode"):
        rollout.encode([], guidance=Guidance(scale=1.0))
