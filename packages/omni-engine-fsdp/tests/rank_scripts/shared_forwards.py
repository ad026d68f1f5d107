"""One rank of families/test_shared_forwards.py: families' forwards that two ranks compute together.

`python shared_forwards.py CASES` takes JSON, a list of {family, path, size}. For each family and way it
prints how far velocity and gradient are from a single rank's, relative to their norms, or what was
refused. Letters: B rows.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from omni_core import plugins
from omni_core.model import NO_GUIDANCE, Denoiser, EditConditioner, Guidance, Step
from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, DType
from omni_engine_fsdp import sharding
from omni_engine_fsdp.branch_parallel import BranchParallelDenoiser
from omni_engine_fsdp.sequence_parallel import split_sequences

PROMPTS = ("a red sign that says no", "blue")
SIDE = 6
"""Of latents: 9 patches of 2 x 2, which do not divide."""
SIGMAS = torch.tensor([0.95, 0.92])
GUIDED = Guidance(scale=4.5)

Way = Callable[[Denoiser], Denoiser]


def branches(denoiser: Denoiser) -> Denoiser:
    """A branch on each rank."""
    return BranchParallelDenoiser(denoiser, dist.group.WORLD)


def sequence(denoiser: Denoiser) -> Denoiser:
    """Half of every sequence on each rank."""
    for name, expert in denoiser.experts.items():
        plan = denoiser.sequence_plan(expert)
        if plan is None:
            msg = "no plan"
            raise ValueError(msg)
        split_sequences(expert, plan, dist.group.WORLD, name=name)
    return denoiser


def sharded(denoiser: Denoiser) -> Denoiser:
    """The same of sharded weights, blocks being called again in the backward pass."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for expert in denoiser.experts.values():
        module: Any = expert
        module.enable_gradient_checkpointing()
        module.train()
        sharding.shard(
            expert,
            denoiser.shard_units(expert),
            mesh=mesh,
            policy=MixedPrecisionPolicy(),
            whole=(),
            reshard_after_forward=True,
        )
    return sequence(denoiser)


WAYS: dict[str, tuple[Way, Guidance]] = {
    "branches": (branches, GUIDED),
    "one branch": (branches, NO_GUIDANCE),
    "sequence": (sequence, GUIDED),
    "sharded sequence": (sharded, NO_GUIDANCE),
}


class Family:
    """A family over its tiny pipeline, in float64."""

    def __init__(self, family: str, path: str, size: dict[str, Any]) -> None:
        config = DiffusionModelConfig(
            path=path, pipeline=DiffusionPipelineConfig(**size), dtype=DType.FLOAT64
        )
        self.family: Any = plugins.registry(plugins.MODELS).get(family).build(config)
        generator = torch.Generator().manual_seed(3)
        codec = self.family.load_codec(torch.float64)
        shapes = codec.latent_shapes(config.pipeline)
        if len(shapes) == 1:
            shapes = {name: (*shape[:-2], SIDE, SIDE) for name, shape in shapes.items()}
        self.latents = {
            name: torch.randn(len(PROMPTS), *shape, generator=generator)
            for name, shape in shapes.items()
        }
        negative = "" if family.startswith("flux") else "photo"
        asked: dict[str, Any] = {"negative_prompt": negative, "guidance": GUIDED}
        conditioner = self.family.load_conditioner(torch.float64)
        if isinstance(conditioner, EditConditioner):
            images = [torch.full((24, 40, 3), 90 + row, dtype=torch.uint8) for row in (0, 1)]
            encoded = conditioner.encode_edits(list(PROMPTS), images, codec, **asked)
        else:
            encoded = conditioner.encode(list(PROMPTS), **asked)
        self.conditioning = odd(encoded)
        self.alone = {guidance: self.predict(None, guidance) for guidance in (GUIDED, NO_GUIDANCE)}

    def predict(
        self, change: Way | None, guidance: Guidance
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Velocity, and the gradient of every weight: of this rank's part, where ranks share."""
        denoiser: Denoiser = self.family.load_denoiser(torch.float64)
        for expert in denoiser.experts.values():
            expert.to(torch.float64)  # also what is loaded in float32 whatever is asked for
        changed = denoiser if change is None else change(denoiser)
        weights = list(nn.ModuleList(changed.experts.values()).parameters())
        step = Step(index=torch.arange(len(SIGMAS)), sigma=SIGMAS)
        found = changed.velocity(self.latents, step, self.conditioning, guidance)
        generator = torch.Generator().manual_seed(5)
        loss = sum(
            (value * torch.randn(value.shape, generator=generator)).sum()
            for value in found.values()
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        return {n: v.detach() for n, v in found.items()}, [w.grad for w in weights]


def odd(conditioning: Any) -> Any:
    """Texts one token shorter, so that they do not divide either."""
    texts = {
        field.name: getattr(conditioning, field.name)[:, :-1]
        for field in attrs.fields(type(conditioning))
        if field.name.endswith(("prompt_embeds", "prompt_mask"))
        and getattr(conditioning, field.name) is not None
    }
    return attrs.evolve(conditioning, **texts)


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    pairs = [(f - w, w) for f, w in zip(found, wanted, strict=True)]
    norms = [torch.cat([part[i].flatten() for part in pairs]).norm() for i in (0, 1)]
    assert norms[1] > 0
    return float(norms[0] / norms[1])


def added_up(part: Tensor | None, like: Tensor) -> Tensor:
    """A gradient over all ranks; FSDP2 averages it."""
    if isinstance(part, DTensor):
        return part.full_tensor() * dist.get_world_size()
    summed = torch.zeros_like(like) if part is None else part.clone()
    dist.all_reduce(summed)
    return summed


def compare(family: Family, way: Way, guidance: Guidance) -> dict[str, float] | str:
    """How far a way is from a single rank, or why it is refused."""
    wanted, whole = family.alone[guidance]
    try:
        found, parts = family.predict(way, guidance)
    except ValueError as error:
        return str(error)
    gradients = []
    used = [gradient for gradient in whole if gradient is not None]
    for part, like in zip(parts, whole, strict=True):
        if like is None:
            assert part is None
            continue
        gradients.append(added_up(part, like))
    return {
        "velocity": apart(list(found.values()), list(wanted.values())),
        "gradient": apart(gradients, used),
    }


def main(cases: list[dict[str, Any]]) -> object:
    """Try every way of every family."""
    said = {}
    for case in cases:
        family = Family(**case)
        for name, (way, guidance) in WAYS.items():
            said[f"{case['family']} {name}"] = compare(family, way, guidance)
    return said


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
    dist.destroy_process_group()
    # Alive at exit, gloo's threads abort the process now and then.
    gc.collect()
