"""What the tests of several ranks run, in each of them: `python ranks.py RANK SIZE STORE MODEL OUT`.

Each scenario leaves tensors or plain data below OUT; the tests compare them with one rank's, which they
compute with the functions of this file in their own process.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni_core import plugins
from omni_core.choices import Policy, SigmaDraw, StepKind
from omni_core.engine import (
    LossFunction,
    LossInputs,
    LossTerms,
    NonFiniteGradientsError,
    TrainBatch,
)
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import ForwardLossInputs, denoising_error, velocity_error
from omni_core.model import Denoiser, Guidance, SequencePlan, Step
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DType,
    EMAConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.samples import requests_for
from omni_core.trajectory import (
    BatchPlace,
    Conditioning,
    RolloutRequest,
    SampleRecord,
    SamplingSpec,
    Trajectory,
)
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    ForwardDiffusersFSDPEngine,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
    SD3Family,
    ShardBase,
)
from omni_engine_fsdp.accumulation import AccumulatingEngine
from omni_engine_fsdp.call_plan import CallPlanError
from omni_engine_fsdp.families.sd3 import SD3Conditioning, SD3Denoiser
from omni_engine_fsdp.sharding import local

LR = OptimizerConfig(lr=1e-2, max_grad_norm=0.05, max_nonfinite_steps=1)
WINDOWS = ((0, 1), (1, 2), (0, 2))
SCHEDULE = FlowMatchSchedule.linear(4, shift=3.0)
SPEC = SamplingSpec(
    sigmas=SCHEDULE.values(),
    guidance_scale=3.0,
    height=16,
    width=16,
    max_sequence_length=8,
    kind=StepKind.SDE,
    noise_level=0.7,
)


class TwoExperts(Denoiser):
    """Two transformers of one pipeline: `high` serves the first step, `low` the others."""

    branches_as_batch = True

    def __init__(self, high: SD3Denoiser, low: SD3Denoiser) -> None:
        self.parts = {"high": high, "low": low}

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        return {name: part.transformer for name, part in self.parts.items()}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.parts["high"].lora_targets

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        return self.parts["high"].shard_units(expert)

    def sequence_plan(self, expert: nn.Module) -> SequencePlan:
        return self.parts["high"].sequence_plan(expert)

    def expert_at(self, sigma: float) -> str:
        return "high" if sigma > SCHEDULE.values()[1] else "low"

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        names = {self.expert_at(sigma) for sigma in step.sigma.tolist()}
        (name,) = names  # a micro-batch holds rows of one expert
        return self.parts[name].velocity(latents, step, conditioning, guidance)


class TwoExpertFamily(SD3Family):
    def load_denoiser(self, dtype: torch.dtype) -> Any:
        return TwoExperts(super().load_denoiser(dtype), super().load_denoiser(dtype))


def register_two_experts() -> None:
    if "two_experts" not in plugins.registry(plugins.MODELS).names():
        plugin = plugins.Plugin(
            api=1, options=DiffusionModelConfig, target=f"{__name__}:TwoExpertFamily"
        )
        plugins.registry(plugins.MODELS).register("two_experts", plugin)


def build(
    path: Path,
    *,
    dtype: DType = DType.FLOAT32,
    shard: ShardBase = ShardBase.AUTO,
    family: str = "sd3",
    micro_batch_size: int = 2,
    kind: type[Any] = PPODiffusersFSDPEngine,
    adapters: tuple[str, ...] = (),
    teachers: Sequence[Path] = (),
    lora: LoRAConfig | None = LoRAConfig(rank=2, alpha=8.0),  # noqa: B008 -- frozen
    optimizer: OptimizerConfig = LR,
    **options: Any,
) -> Any:
    """Build and initialize an engine; *options* are fields of FSDPEngineConfig."""
    engine = kind(
        DiffusionModelConfig(
            path=str(path),
            family=family,
            dtype=dtype,
            lora=lora,
            pipeline=DiffusionPipelineConfig(height=16, width=16, max_sequence_length=8),
        ),
        FSDPEngineConfig(
            device="cpu", shard_base=shard, micro_batch_size=micro_batch_size, **options
        ),
        optimizer,
        None,
    )
    for name in adapters:
        engine.add_adapter(name)
    for place, directory in enumerate(teachers):
        engine.add_teacher(f"t{place}", directory)
    engine.initialize()
    return engine


def rows(
    chosen: Sequence[int],
    windows: Sequence[tuple[int, ...]] = WINDOWS,
    *,
    sides: tuple[int, int] = (4, 4),
    text: int = 24,
    guidance: float = 3.0,
) -> TrainBatch:
    """Some of the drawn rows, one for each window; the denominator is that of all of them."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    generator = torch.Generator().manual_seed(5)
    count = len(windows)
    trajectory = Trajectory(
        latents={"image": draw(count, 5, 8, *sides)},
        step_indices=torch.tensor(windows),
        log_probs=draw(count, len(windows[0])),
        conditioning=SD3Conditioning(
            prompt_embeds=draw(count, text, 32),
            pooled=draw(count, 16),
            negative_prompt_embeds=draw(count, text, 32),
            negative_pooled=draw(count, 16),
        ),
        prompt_index=torch.arange(count),
        media=None,
        records=tuple(
            SampleRecord(group_id=str(row), row_id=str(row), k=0, seed=row, prompt="")
            for row in range(count)
        ),
        effective=attrs.evolve(SPEC, guidance_scale=guidance),
        adapter="default",
        weight_version=0,
        places=tuple(BatchPlace("0/0/0", row, count) for row in range(count)),
    )
    batch = TrainBatch(
        trajectory=trajectory,
        advantages=draw(count),
        weights=torch.ones(count),
        denominator=float(trajectory.step_indices.numel()),
    )
    return batch.select(torch.tensor(list(chosen)))


def loss(inputs: LossInputs) -> LossTerms:
    log_probs = inputs.current.require_log_prob()
    return LossTerms(terms=-inputs.advantages * log_probs, metrics={"log_prob": log_probs.detach()})


class TeacherLoss:
    """How far the student is from its teacher."""

    needs_teacher = True

    def __call__(self, inputs: LossInputs) -> LossTerms:
        assert inputs.teacher is not None
        return LossTerms(terms=velocity_error(inputs.current.velocity, inputs.teacher.velocity))


def taught(engine: PPODiffusersFSDPEngine, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Gradients of rows that have the first teacher, but the last row, which has the second."""
    places = torch.tensor([int(row == 2) for row in chosen])
    return gradients(engine, attrs.evolve(rows(chosen), teachers=places), TeacherLoss())


def make_teachers(model: Path, out: Path) -> None:
    """Exports after one update and after two, and the same for two experts alike."""
    engine = build(model)
    for name in ("one", "two"):
        engine.train_batch(rows([0, 1, 2]), loss)
        engine.export_adapter(out / f"sd3-{name}")
        if engine.get_data_parallel_rank() == 0:
            for expert in ("high", "low"):
                shutil.copytree(
                    out / f"sd3-{name}" / "peft", out / f"two_experts-{name}" / "peft" / expert
                )


class ForwardLoss:
    """A loss of the forward process that compares with the reference, at three sigmas of a sample."""

    forward_needs = ForwardNeeds(draws=3, sigmas=SigmaDraw.UNIFORM, others=(Policy.REFERENCE,))

    def __call__(self, inputs: ForwardLossInputs) -> LossTerms:
        assert inputs.reference is not None
        away = velocity_error(inputs.current, inputs.reference)
        error = denoising_error(inputs.current, inputs.clean, inputs.noise)
        return LossTerms(terms=inputs.advantages * error + away)


def forward_rows(chosen: Sequence[int]) -> TrainBatch:
    return attrs.evolve(rows(chosen), denominator=9.0)


def gradients(
    engine: AccumulatingEngine[Any], batch: TrainBatch, loss: LossFunction = loss
) -> dict[str, Tensor]:
    """Whole gradients before clipping."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
    found = {}
    for name, parameter in engine.trained().items():
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad)
    engine.optimizer_zero_grad()
    return found


def warm(engine: AccumulatingEngine[Any]) -> None:
    """Give B weights, so that A has gradients, the same at every world size."""
    generator = torch.Generator().manual_seed(9)
    engine.prepare_weights()
    for name, parameter in engine.trained().items():
        if "lora_B" in name:
            value = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
            with torch.no_grad():
                parameter.copy_(distributed_like(value, parameter))


def distributed_like(value: Tensor, like: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(like, "placements"):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def dense(moment: Any) -> Tensor:
    """A moment of all ranks, what 8 bits stand for as float32."""
    own = local(moment)
    own = own.dequantize() if hasattr(own, "codes") else own
    if not isinstance(moment, DTensor):
        return own.detach().clone()
    layout = {"shape": moment.shape, "stride": moment.stride(), "run_check": False}
    return whole(DTensor.from_local(own, moment.device_mesh, moment.placements, **layout))


def moments(engine: Any) -> dict[str, Tensor]:
    """Every moment of the optimizer, by `weight.moment`."""
    return {
        f"{name}.{moment}": dense(engine.optimizer.state[parameter][moment])
        for name, parameter in engine.trained().items()
        for moment in ("exp_avg", "exp_avg_sq")
    }


def weights(engine: PPODiffusersFSDPEngine, policy: str = "default") -> dict[str, Tensor]:
    found = engine.get_per_tensor_param(adapter=policy)
    return {name: tensor.clone() for name, tensor in found}


def build_full(path: Path, *, shard: ShardBase = ShardBase.AUTO) -> Any:
    """Every weight trained in float64, against a reference and with an average."""
    optimizer = attrs.evolve(LR, ema=EMAConfig(decay=0.5))
    return build(path, dtype=DType.FLOAT64, shard=shard, lora=None, optimizer=optimizer)


class KLLoss:
    """A policy gradient held to the reference."""

    needs_reference = True

    def __call__(self, inputs: LossInputs) -> LossTerms:
        assert inputs.reference is not None
        away = velocity_error(inputs.current.velocity, inputs.reference.velocity)
        return LossTerms(terms=loss(inputs).terms + away)


# -- scenarios: each is run by every rank ------------------------------------------------------------

MINE = ([0, 2], [1])
"""Rows of each of two ranks."""


def case_gradients(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        engine = build(model, shard=shard)
        warm(engine)
        report(out / f"gradients-{shard.value}", rank, gradients(engine, rows(MINE[rank])))


def case_forward(rank: int, model: Path, out: Path) -> None:
    register_two_experts()
    for family in ("sd3", "two_experts"):
        engine = build(model, kind=ForwardDiffusersFSDPEngine, shard=ShardBase.SHARD, family=family)
        warm(engine)
        found = gradients(engine, forward_rows(MINE[rank]), ForwardLoss())
        report(out / f"forward-{family}", rank, found)


def case_adapters(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        engine = build(model, kind=ForwardDiffusersFSDPEngine, shard=shard, adapters=("old", "ema"))
        engine.train_batch(forward_rows(MINE[rank]), ForwardLoss())
        engine.copy_adapter("default", "old")
        engine.ema_update_adapter("default", "ema", 0.5)
        for name in ("default", "old", "ema"):
            found = {n: t.clone() for n, t in engine.get_per_tensor_param(adapter=name)}
            report(out / f"adapter-{name}-{shard.value}", rank, found)


def case_teachers(rank: int, model: Path, out: Path) -> None:
    register_two_experts()
    make_teachers(model, out / "teachers")
    dist.barrier()  # the first rank writes
    for family in ("sd3", "two_experts"):
        made = [out / "teachers" / f"{family}-{name}" for name in ("one", "two")]
        engine = build(model, shard=ShardBase.SHARD, family=family, teachers=made)
        warm(engine)
        report(out / f"taught-{family}", rank, taught(engine, [[0, 1], [2]][rank]))


def case_experts(rank: int, model: Path, out: Path) -> None:
    register_two_experts()
    engine = build(model, family="two_experts")
    warm(engine)
    apart = ((0,), (1,), (2,))  # rank 0 starts on `high`, rank 1 has no row of it
    found = gradients(engine, rows([[0], [1, 2]][rank], apart))
    report(out / "experts", rank, found)


def case_float64(rank: int, model: Path, out: Path) -> None:
    engine = build(model, dtype=DType.FLOAT64)
    for _ in range(3):
        engine.train_batch(rows(MINE[rank]), loss)
    report(out / "float64", rank, weights(engine))


def case_nan(rank: int, model: Path, out: Path) -> None:
    def broken(inputs: LossInputs) -> LossTerms:
        return LossTerms(terms=inputs.current.require_log_prob() * (math.nan if rank else 1.0))

    engine = build(model)
    engine.train_batch(rows(MINE[rank]), loss)
    before = weights(engine)
    skipped = engine.train_batch(rows(MINE[rank]), broken).metrics["skipped"].mean
    try:
        engine.train_batch(rows(MINE[rank]), broken)
        ended = False
    except NonFiniteGradientsError:
        ended = True
    after = weights(engine)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    said = {"skipped": skipped, "ended": ended, "same": same, "version": engine.weight_version}
    (out / f"nan.{rank}.json").write_text(json.dumps(said))


def case_checkpoint(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        straight = build(model, shard=shard)
        for _ in range(4):
            straight.train_batch(rows(MINE[rank]), loss)
        report(out / f"straight-{shard.value}", rank, weights(straight))
        first = build(model, shard=shard)
        for _ in range(2):
            first.train_batch(rows(MINE[rank]), loss)
        folder = out / f"checkpoint-{shard.value}"
        state = json.loads(json.dumps(first.save_checkpoint(folder)))
        (out / f"state-{shard.value}.{rank}.json").write_text(json.dumps(state))
        resumed = build(model, shard=shard)
        resumed.load_checkpoint(folder, state)
        for _ in range(2):
            resumed.train_batch(rows(MINE[rank]), loss)
        report(out / f"resumed-{shard.value}", rank, weights(resumed))


def case_full(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        engine = build_full(model, shard=shard)
        for _ in range(2):
            engine.train_batch(rows(MINE[rank]), KLLoss())
        folder = out / f"full-{shard.value}"
        state = json.loads(json.dumps(engine.save_checkpoint(folder)))
        (out / f"full-state-{shard.value}.{rank}.json").write_text(json.dumps(state))
        engine.train_batch(rows(MINE[rank]), KLLoss())
        for policy in ("default", "ema"):
            report(out / f"full-{policy}-{shard.value}", rank, weights(engine, policy))
    resumed = build_full(model, shard=ShardBase.SHARD)
    resumed.load_checkpoint(folder, state)
    resumed.train_batch(rows(MINE[rank]), KLLoss())
    report(out / "full-resumed", rank, weights(resumed))
    resumed.export_pipeline(out / "full-pipeline")
    # What one rank saved before these two were started.
    back = build_full(model)
    back.load_checkpoint(out / "one-rank", json.loads((out / "one-rank.json").read_text()))
    back.train_batch(rows(MINE[rank]), KLLoss())
    for policy in ("default", "ema"):
        report(out / f"full-back-{policy}", rank, weights(back, policy))


def case_replay(rank: int, model: Path, out: Path) -> None:
    engine = build(model, shard=ShardBase.SHARD)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    asked = requests_for(SPEC, samples_per_prompt=3)
    mine = asked[:2] if rank == 0 else asked[2:]
    trajectory = Trajectory.concat(rollout.generate(mine))
    apart = (engine.replay(trajectory) - trajectory.log_probs).abs().max()
    (out / f"replay.{rank}.json").write_text(json.dumps({"apart": float(apart)}))


def windowed(groups: Sequence[int]) -> list[RolloutRequest]:
    """Groups with a window of their own: ranks do not train the same steps."""
    asked = requests_for(SPEC, samples_per_prompt=2)
    return [attrs.evolve(asked[group], window=WINDOWS[group]) for group in groups]


def sampled_batch(engine: PPODiffusersFSDPEngine, groups: Sequence[int]) -> TrainBatch:
    """Rows of some groups, sampled by the engine itself; the denominator is that of three groups."""
    engine.begin_rollout()
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    found = rollout.generate(windowed(groups), decode=False)
    advantages = torch.tensor([[1.0, -0.5], [0.25, 2.0], [-1.0, 0.75]])[list(groups)]
    return TrainBatch(
        trajectory=Trajectory.concat(found),
        advantages=advantages.flatten(),
        weights=torch.ones(2 * len(groups)),
        denominator=12.0,
    )


def case_kept(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        engine = build(model, shard=shard, keep_graph=True)
        warm(engine)
        batch = sampled_batch(engine, MINE[rank])
        assert torch.equal(engine.replay(batch.trajectory), batch.trajectory.log_probs)
        report(out / f"kept-{shard.value}", rank, gradients(engine, batch))


def case_merged(rank: int, model: Path, out: Path) -> None:
    for shard in (ShardBase.REPLICATE, ShardBase.SHARD):
        engine = build(model, shard=shard)
        warm(engine)
        before = dict(engine.get_per_tensor_param(adapter=None))
        with engine.eval_mode(), engine.merged_adapter("default"):
            merged = engine.infer_batch(rows([0, 1])).log_probs
            report(
                out / f"merged-{shard.value}", rank, dict(engine.get_per_tensor_param(adapter=None))
            )
        after = dict(engine.get_per_tensor_param(adapter=None))
        assert all(torch.equal(after[name], value) for name, value in before.items())
        apart = (merged - engine.infer_batch(rows([0, 1])).log_probs).abs().max()
        (out / f"merged-{shard.value}.{rank}.json").write_text(json.dumps(float(apart)))


def case_disagree(rank: int, model: Path, out: Path) -> None:
    engine = build(model)
    batch = rows(MINE[rank])
    try:
        if rank:
            engine.infer_batch(batch)
        else:
            engine.train_batch(batch, loss)
        said = ""
    except CallPlanError as error:
        said = str(error)
    (out / f"disagree.{rank}.json").write_text(json.dumps({"said": said}))


SCENARIOS: tuple[Callable[[int, Path, Path], None], ...] = (
    case_gradients,
    case_experts,
    case_forward,
    case_teachers,
    case_adapters,
    case_float64,
    case_nan,
    case_checkpoint,
    case_full,
    case_replay,
    case_kept,
    case_merged,
    case_disagree,
)


def report(file: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, file.with_name(f"{file.name}.{rank}.safetensors"))


def main(rank: int, size: int, store: str, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    for scenario in SCENARIOS:
        scenario(rank, model, out)
    dist.barrier()
    dist.destroy_process_group()
    # FSDP2's reference cycles keep gloo's threads; alive at exit, they abort the process now and then.
    gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
