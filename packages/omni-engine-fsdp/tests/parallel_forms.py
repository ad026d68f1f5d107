"""What test_parallel_forms.py runs on each of four ranks: `python parallel_forms.py RANK STORE MODEL OUT`.

One programme builds an engine in every parallel form, one after another, and leaves gradients and
weights below OUT.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import ranks
import torch
import torch.distributed as dist
from ranks import LR, SPEC, KLLoss, build, gradients, register_two_experts, report, warm, weights

from omni_core.engine import TrainBatch
from omni_core.options import DType, EMAConfig, LoRAConfig
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, ShardBase, ShardTrained
from omni_engine_fsdp.call_plan import CallPlanError

RANKS = 4
LORA = LoRAConfig(rank=2, alpha=8.0)
SHARD, WHOLE = ShardBase.SHARD, ShardTrained.REPLICATE
FORMS: Mapping[str, Mapping[str, Any]] = {
    "sharded": {"shard": SHARD},
    "replicated": {"shard": ShardBase.REPLICATE, "shard_trained": WHOLE},
    "replicated_beside_a_sharded_base": {"shard": SHARD, "shard_trained": WHOLE},
    "hsdp": {"shard": SHARD, "replicate": 2},
    "sequence": {"shard": SHARD, "ulysses": 2},
    "branches": {"shard": SHARD, "cfg_parallel": 2},
    "sequence_and_branches": {"shard_trained": WHOLE, "ulysses": 2, "cfg_parallel": 2},
    "sequence_in_copies": {"shard": SHARD, "ulysses": 2, "replicate": 2},
}
TRAINED: Mapping[str, LoRAConfig | None] = {"lora": LORA, "full": None}
AVERAGED = attrs.evolve(LR, ema=EMAConfig(decay=0.5))
POLICIES = ("default", "ema")
"""The trained one, held to the reference, and its moving average."""
WINDOWS = ((0, 1), (1, 2), (0, 2), (0, 1), (1, 2))
APART = ((0,), (1,), (2,), (1,), (0,))
"""Each row needs one expert of two."""
ODD: Mapping[str, Any] = {"sides": (6, 6), "text": 23}
"""9 image and 23 text tokens: no two ranks have equal parts of them."""


def together(form: str) -> int:
    """Ranks that hold the same rows."""
    return int(FORMS[form].get("ulysses", 1) * FORMS[form].get("cfg_parallel", 1))


def mine(form: str, rank: int) -> list[int]:
    """The rows of a rank, of five: every n-th of n parts."""
    return list(range(5))[rank // together(form) :: RANKS // together(form)]


def make(form: str, model: Path, **more: Any) -> Any:
    """Build an engine in one of the forms, in float64."""
    return build(model, dtype=DType.FLOAT64, **FORMS[form], **more)


def prepared(engine: Any, trained: str) -> Any:
    """A LoRA as if it had been trained: A has no gradient while B is zero."""
    if trained == "lora":
        warm(engine)
    return engine


def batch(chosen: list[int], **more: Any) -> TrainBatch:
    """Some of the five rows."""
    return ranks.rows(chosen, WINDOWS, **{**ODD, **more})


def requests(form: str | None, rank: int) -> list[RolloutRequest]:
    """Three groups; a rank's of them, or all."""
    asked = requests_for(SPEC, samples_per_prompt=2)
    if form is None:
        return asked
    return asked[rank // together(form) :: RANKS // together(form)]


def sampled(engine: Any, asked: list[RolloutRequest]) -> tuple[dict[str, torch.Tensor], float]:
    """(Sample -> its last latents, how far a replay is from what was scored)."""
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    found = rollout.generate(asked)
    apart = 0.0
    if asked:
        joined = Trajectory.concat(found)
        apart = float((engine.replay(joined) - joined.log_probs).abs().max())
    names = {
        f"{record.group_id}-{record.k}": trajectory.latents["image"][row, -1].clone()
        for trajectory in found
        for row, record in enumerate(trajectory.records)
    }
    return names, apart


def run(form: str, rank: int, model: Path, out: Path) -> None:
    """Everything that is tried of a form."""
    own = mine(form, rank)
    said: dict[str, Any] = {}
    for trained, lora in TRAINED.items():
        engine = prepared(make(form, model, lora=lora, optimizer=AVERAGED), trained)
        report(out / f"{form}-{trained}-gradients", rank, gradients(engine, batch(own)))
        for _ in range(3):
            engine.train_batch(batch(own), KLLoss())
        for policy in POLICIES:
            report(out / f"{form}-{trained}-{policy}", rank, weights(engine, policy))
        said["place"] = [
            engine.get_data_parallel_rank(),
            engine.get_data_parallel_size(),
            engine.is_mp_src_rank_with_outputs(),
        ]
    unguided = prepared(make(form, model), "lora")
    found = gradients(unguided, batch(own, guidance=1.0))
    report(out / f"{form}-unguided", rank, found)
    experts = prepared(make(form, model, family="two_experts"), "lora")
    found = gradients(experts, ranks.rows(own, APART, **ODD))
    report(out / f"{form}-experts", rank, found)
    if together(form) > 1 and "replicate" not in FORMS[form]:
        found, said["replay"] = sampled(make(form, model), requests(form, rank))
        report(out / f"{form}-sampled", rank, found)
    (out / f"{form}.{rank}.json").write_text(json.dumps(said))


def mistakes(rank: int, model: Path, out: Path) -> None:
    """Rows that differ where they must not, and numbers that do not divide."""
    said = {}
    engine = make("sequence", model)
    try:
        engine.infer_batch(batch([rank]))
    except CallPlanError as error:
        said["rows"] = str(error)
    for name, options in {
        "ranks": {"ulysses": 3},
        "copies": {"replicate": 3},
        "heads": {"ulysses": 4},
    }.items():
        try:
            build(model, **options)
        except ValueError as error:
            said[name] = str(error)
    (out / f"mistakes.{rank}.json").write_text(json.dumps(said))


def main(rank: int, store: str, model: Path, out: Path) -> None:
    """Run every form."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    register_two_experts()
    for form in FORMS:
        run(form, rank, model, out)
    mistakes(rank, model, out)
    dist.barrier()
    dist.destroy_process_group()
    # FSDP2's reference cycles keep gloo's threads; alive at exit, they abort the process now and then.
    gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
