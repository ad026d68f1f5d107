"""The toys keep every contract: the conformance suites run on them, and a toy run learns.

It is also the example of how a plugin is put under the suites.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
import torch

from omni_core.algorithm import Algorithm
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.engine import BaseEngine, CheckpointError, TrainBatch
from omni_core.losses import ConfiguredLoss
from omni_core.model import Guidance, Step
from omni_core.options import (
    CheckpointConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.plugins import ENGINES, REWARDS, EngineRegistry, registry
from omni_core.reward import RewardFunction, RewardInput
from omni_core.rollout import RolloutState, RolloutTimeoutError, WeightUpdate
from omni_core.seeds import derive_seed
from omni_core.testing import (
    AlgorithmSuite,
    EngineSuite,
    RewardSuite,
    RolloutSuite,
    requests_for,
    train_batch,
)
from omni_core.testing.toys import (
    ToyCodec,
    ToyConditioner,
    ToyEngine,
    ToyEngineConfig,
    ToyFamily,
    ToyReward,
    ToyRewardConfig,
    ToyRollout,
    ToyRolloutConfig,
    register_toys,
    unregister_toys,
)
from omni_core.testing.toys.options import ToyPlacement
from omni_core.trajectory import Conditioning, Media, SamplingSpec, Trajectory

PIPELINE = DiffusionPipelineConfig(height=16, width=12, max_sequence_length=8)
LORA = DiffusionModelConfig(
    path="toy", family="toy", lora=LoRAConfig(rank=4, alpha=8.0), pipeline=PIPELINE
)
FULL = attrs.evolve(LORA, lora=None)
FLOAT64 = attrs.evolve(LORA, dtype=DType.FLOAT64)


def make_engine(
    model: DiffusionModelConfig = LORA,
    *,
    micro_batch_size: int = 8,
    optimizer: OptimizerConfig | None = None,
    gradient_checkpointing: bool = False,
) -> ToyEngine:
    options = ToyEngineConfig(
        micro_batch_size=micro_batch_size, gradient_checkpointing=gradient_checkpointing
    )
    engine = ToyEngine(model, options, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def make_rollout(engine: BaseEngine) -> ToyRollout:
    assert isinstance(engine, ToyEngine)
    return ToyRollout(ToyRolloutConfig(batch_size=4), engine=engine)


def spec(kind: StepKind = StepKind.SDE) -> SamplingSpec:
    schedule = ToyFamily(LORA).stock_schedule(DiffusionSamplingConfig(num_inference_steps=5))
    return SamplingSpec(
        sigmas=schedule.values(),
        guidance_scale=1.5,
        height=16,
        width=12,
        max_sequence_length=8,
        kind=kind,
        noise_level=0.7,
    )


class TestToyEngine(EngineSuite):
    model = LORA

    @pytest.fixture
    def make_engine(self) -> Callable[..., BaseEngine]:
        return functools.partial(make_engine, self.model)

    @pytest.fixture
    def make_rollout(self) -> Callable[[BaseEngine], ToyRollout]:
        return make_rollout

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        return spec()


class TestToyEngineWithEveryWeight(TestToyEngine):
    model = FULL
    gradient_bound = 1e-5


class TestToyEngineInFloat64(TestToyEngine):
    model = FLOAT64
    gradient_bound = 1e-12


class TestToyEngineWithCPS(TestToyEngine):
    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        return spec(StepKind.CPS)


class TestToyRollout(RolloutSuite):
    @pytest.fixture
    def engine(self) -> ToyEngine:
        return make_engine()

    @pytest.fixture
    def rollout(self, engine: ToyEngine) -> ToyRollout:
        return make_rollout(engine)

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        return spec()

    @pytest.fixture
    def velocity(self, engine: ToyEngine) -> object:
        return engine.denoiser.velocity


class TestToyReplica(TestToyRollout):
    sleeps = True

    @pytest.fixture
    def rollout(self, engine: ToyEngine) -> ToyRollout:
        options = ToyRolloutConfig(batch_size=4, placement=ToyPlacement.REPLICA)
        rollout = ToyRollout(options, engine=engine)
        assert rollout.state is RolloutState.WEIGHTS_STALE
        rollout.update(push(engine, version=0))
        rollout.resume()
        return rollout

    @pytest.fixture
    def make_update(self, engine: ToyEngine) -> Callable[[int], WeightUpdate]:
        return lambda version: push(engine, version=version)


def push(engine: ToyEngine, *, version: int) -> WeightUpdate:
    tensors = {n: t.detach().clone() for n, t in engine.get_per_tensor_param()}
    return WeightUpdate(version=version, tensors=tensors, alpha_over_rank=2.0)


CLIPS = attrs.evolve(
    LORA, family="toy_clips", pipeline=attrs.evolve(PIPELINE, num_frames=3, frame_rate=8.0)
)


def clip_spec() -> SamplingSpec:
    return attrs.evolve(spec(), num_frames=3, frame_rate=8.0)


@pytest.mark.usefixtures("toys")
class TestToyEngineOnTwoModalities(TestToyEngine):
    model = CLIPS

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        return clip_spec()


@pytest.mark.usefixtures("toys")
class TestToyRolloutOfTwoModalities(TestToyRollout):
    @pytest.fixture
    def engine(self) -> ToyEngine:
        return make_engine(CLIPS)

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        return clip_spec()


class TestToyReward(RewardSuite):
    tolerance = 0.0

    @pytest.fixture
    def reward(self) -> RewardFunction:
        return ToyReward(ToyRewardConfig())

    @pytest.fixture
    def media(self) -> Media:
        image = torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1, 1) * 100
        return Media(image=image.expand(3, 4, 4, 3).contiguous())

    @pytest.fixture
    def inputs(self) -> Sequence[RewardInput]:
        return [RewardInput(prompt=p) for p in ("a dark room", "a sign", "a Dark cat")]

    @pytest.fixture
    def failing(self, media: Media) -> tuple[Media, Sequence[RewardInput]]:
        return media, [RewardInput(prompt=p) for p in ("a sign", "  ", "dark")]

    def test_scores_are_the_brightness(
        self, reward: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        values = [result.value for result in reward.score(media, inputs)]
        assert values == pytest.approx([1.0, 100 / 255, 1.0 - 200 / 255])


class TestFlowGRPO(AlgorithmSuite):
    options = FlowGRPOOptions(kl_coef=0.04)

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        return FlowGRPO(self.options)


class TestFlowGRPOFast(TestFlowGRPO):
    options = FlowGRPOOptions(window_size=2, kind=StepKind.CPS)


# -- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def toys() -> Iterator[None]:
    register_toys()
    yield
    unregister_toys()


@pytest.mark.usefixtures("toys")
def test_toys_are_found_by_name_and_a_second_registration_changes_nothing() -> None:
    register_toys()
    built = EngineRegistry.new(
        "diffusion",
        "toy",
        "cpu",
        model_config=LORA,
        engine_config=ToyEngineConfig(),
        optimizer_config=None,
        checkpoint_config=None,
    )
    assert isinstance(built, ToyEngine)
    assert isinstance(registry(REWARDS).get("toy").build(ToyRewardConfig()), ToyReward)
    unregister_toys()
    assert "diffusion.toy" not in registry(ENGINES).names()


def test_a_toy_run_learns() -> None:
    engine = make_engine(
        attrs.evolve(LORA, pipeline=attrs.evolve(PIPELINE, width=16)),
        micro_batch_size=64,
        optimizer=OptimizerConfig(lr=1e-2),
    )
    rollout, reward = make_rollout(engine), ToyReward(ToyRewardConfig())
    options = FlowGRPOOptions(clip_ratio=1e-2)
    algorithm = FlowGRPO(options)
    loss = ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=options))
    sampling = attrs.evolve(spec(), width=16)
    means = []
    for step in range(16):
        asked = requests_for(sampling, ["bright", "dark"], samples_per_prompt=12, step=step)
        trajectory = Trajectory.concat(rollout.generate(asked))
        assert torch.equal(engine.replay(trajectory), trajectory.log_probs)
        assert trajectory.media is not None
        inputs = [RewardInput(prompt=record.prompt) for record in trajectory.records]
        rewards = torch.tensor([r.value for r in reward.score(trajectory.media, inputs)])
        found = algorithm.advantages(
            rewards,
            [record.group_id for record in trajectory.records],
            torch.ones(trajectory.rows, dtype=torch.bool),
        )
        batch = attrs.evolve(train_batch(trajectory), advantages=found.advantages)
        engine.train_batch(batch, loss)
        means.append(float(rewards.mean()))
    assert engine.weight_version == 16
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.1, means


@pytest.mark.usefixtures("toys")
def test_a_clip_is_a_video_with_its_sound_and_both_are_in_the_log_prob() -> None:
    engine = make_engine(CLIPS)
    trajectory = Trajectory.concat(make_rollout(engine).generate(requests_for(clip_spec())))
    media = trajectory.media
    assert media is not None
    assert media.image is None
    assert media.video is not None
    assert media.audio is not None
    assert (media.video.shape, media.video.dtype) == ((6, 3, 16, 12, 3), torch.uint8)
    assert (media.audio.shape, media.audio.dtype) == ((6, 1, 18), torch.float32)
    assert (media.frame_rate, media.audio_rate) == (8.0, 48)
    scores = ToyReward(ToyRewardConfig()).score(media, [RewardInput(prompt="a sign")] * 6)
    assert {*scores[0].details} == {"brightness", "loudness"}
    generator = torch.Generator().manual_seed(0)
    for modality in ("video", "audio"):
        moved = dict(trajectory.latents)
        noise = torch.randn(moved[modality].shape, generator=generator)
        moved[modality] = moved[modality] + 1e-1 * noise
        found = engine.replay(attrs.evolve(trajectory, latents=moved))
        assert (found - trajectory.log_probs).abs().min() > 0


@pytest.mark.usefixtures("toys")
def test_a_second_guidance_scale_needs_something_to_guide() -> None:
    asked = requests_for(attrs.evolve(spec(), guidance_scale_2=2.0))
    with pytest.raises(ValueError, match=r"guidance_scale_2 2\.0: this family has one"):
        make_rollout(make_engine()).submit(asked)


# -- what the suites do not see -------------------------------------------------------------------


def test_gradient_checkpointing_changes_no_bit() -> None:
    engine = make_engine(optimizer=OptimizerConfig())
    batch = train_batch(Trajectory.concat(make_rollout(engine).generate(requests_for(spec()))))
    loss = ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=FlowGRPOOptions()))
    found = []
    for checkpointing in (False, True):
        engine = make_engine(optimizer=OptimizerConfig(), gradient_checkpointing=checkpointing)
        engine.train_batch(batch, loss)
        found.append(dict(engine.get_per_tensor_param()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


def test_case_26_a_target_that_matches_nothing_is_refused_with_counts() -> None:
    lora = LoRAConfig(targets=("up", "no_such_layer"))
    with pytest.raises(ValueError, match=r"up: 2, no_such_layer: 0"):
        make_engine(attrs.evolve(LORA, lora=lora))


def test_case_24_adapters_keep_their_flags_and_are_switched_by_name() -> None:
    engine = make_engine(optimizer=OptimizerConfig())
    engine.add_adapter("old")
    flags = {name: p.requires_grad for name, p in engine.module.named_parameters()}
    assert not any(flag for name, flag in flags.items() if name.endswith(".old"))
    batch = batch_of(engine)
    loss = ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=FlowGRPOOptions()))
    engine.train_batch(batch, loss)
    with engine.use_adapter("old"):
        old = engine.infer_batch(batch).log_probs
    assert old is not None
    torch.testing.assert_close(old, batch.trajectory.log_probs, rtol=0.0, atol=1e-6)
    engine.copy_adapter("default", "old")
    for ours, theirs in zip(
        engine.get_per_tensor_param(), engine.get_per_tensor_param(adapter="old"), strict=True
    ):
        assert torch.equal(ours[1], theirs[1])
    assert {name: p.requires_grad for name, p in engine.module.named_parameters()} == flags
    with pytest.raises(ValueError, match="default, old"), engine.use_adapter("new"):
        pass


def test_an_ema_adapter_moves_by_its_share() -> None:
    engine = make_engine()
    engine.add_adapter("ema")
    theirs = dict(engine.get_per_tensor_param(adapter="ema"))
    name = next(name for name in theirs if ".lora_B." in name)
    with torch.no_grad():
        dict(engine.get_per_tensor_param())[name.replace(".ema", ".default")].fill_(1.0)
    engine.ema_update_adapter("default", "ema", 0.9)
    torch.testing.assert_close(theirs[name], torch.full_like(theirs[name], 0.1))


def batch_of(engine: ToyEngine) -> TrainBatch:
    return train_batch(Trajectory.concat(make_rollout(engine).generate(requests_for(spec()))))


def test_replay_refuses_half_a_batch() -> None:
    engine = make_engine()
    trajectory = Trajectory.concat(make_rollout(engine).generate(requests_for(spec())))
    with pytest.raises(ValueError, match="needs all rows of batch"):
        engine.replay(trajectory.select(torch.tensor([0, 1])))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    state = make_engine().save_checkpoint(tmp_path)
    other = make_engine(attrs.evolve(LORA, path="another toy"))
    with pytest.raises(CheckpointError, match="base weights differ"):
        other.load_checkpoint(tmp_path, state)
    wider = make_engine(attrs.evolve(LORA, lora=LoRAConfig(rank=2)))
    with pytest.raises(CheckpointError, match="name or shape"):
        wider.load_checkpoint(tmp_path, state)


def test_a_stream_that_gives_nothing_times_out_and_is_cancelled() -> None:
    rollout = make_rollout(make_engine())
    rollout.pause()
    with pytest.raises(RolloutTimeoutError, match="3 requests"):
        rollout.generate(requests_for(spec()), timeout=0.02)
    rollout.resume()
    assert len(rollout.generate(requests_for(spec()))) == 3


def test_a_reader_that_stops_cancels_the_rest() -> None:
    rollout = make_rollout(make_engine())
    stream = rollout.stream(requests_for(spec()))
    first = next(stream)
    stream.close()
    assert first.rows == 2
    assert rollout._jobs == {}
    assert rollout._queue == []
    assert len(rollout.generate(requests_for(spec()))) == 3


def test_a_shared_rollout_acknowledges_what_it_has_and_refuses_anything_else() -> None:
    engine = make_engine(optimizer=OptimizerConfig())
    rollout = make_rollout(engine)
    rollout.pause()
    update = push(engine, version=1)
    assert rollout.update(update).bound == tuple(update.tensors)
    other = {name: tensor + 1.0 for name, tensor in update.tensors.items()}
    with pytest.raises(ValueError, match="other values"):
        rollout.update(attrs.evolve(update, version=2, tensors=other))


def test_the_conditioner_is_deterministic_and_cuts_at_its_length() -> None:
    conditioner = ToyConditioner(2)
    plain = Guidance(scale=1.0)
    text = conditioner.encode(["a sign x", "a sign"], negative_prompt="", guidance=plain).text
    assert torch.equal(text[0], text[1])
    word = torch.randn(8, generator=torch.Generator().manual_seed(derive_seed("toy-word", "a")))
    alone = conditioner.encode(["a"], negative_prompt="", guidance=Guidance(scale=2.0))
    assert torch.equal(alone.text[0], word)
    assert alone.negative_text is not None
    assert alone.negative_text.tolist() == [[0.0] * 8]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 4"):
        ToyCodec().latent_shapes(attrs.evolve(PIPELINE, height=18))
    with pytest.raises(ValueError, match="multiples of 4"):
        make_rollout(make_engine()).submit(requests_for(attrs.evolve(spec(), width=13)))


def test_guidance_needs_the_negative_branch() -> None:
    engine = make_engine()
    conditioning: Conditioning = engine.family.load_conditioner(torch.float32).encode(
        ["a"], negative_prompt="", guidance=Guidance(scale=1.0)
    )
    step = Step(index=torch.zeros(1, dtype=torch.int64), sigma=torch.ones(1))
    latents = {"image": torch.zeros(1, 3, 4, 3)}
    with pytest.raises(ValueError, match="negative"):
        engine.denoiser.velocity(latents, step, conditioning, Guidance(scale=2.0))


def test_toys_need_no_pytest_and_their_plugins_no_torch() -> None:
    code = (
        "import sys\n"
        "from omni_core.testing.toys import register_toys\n"
        "register_toys()\n"
        "assert 'torch' not in sys.modules\n"
        "from omni_core.testing.toys import ToyEngine, ToyRollout, ToyReward\n"
        "assert 'pytest' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
