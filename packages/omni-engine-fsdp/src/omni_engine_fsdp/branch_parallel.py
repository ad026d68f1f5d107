"""CFG parallelism: the two branches of classifier-free guidance run on two ranks.

A family that calls its expert once for both branches, as the two halves of a batch, needs to know
nothing of it: each rank's expert takes its half, and the halves are joined behind it. Without guidance
there is one branch, which both ranks compute. Letters: B rows of both branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_core.model import Denoiser, Guidance, SequencePlan, Step
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp import collectives


@attrs.define(eq=False)
class _Halves:
    """What is done around an expert's forward."""

    group: Any
    rowless: tuple[str, ...] = ()
    """Keyword arguments that are the same for all rows."""
    branches: int = 1
    """Of the velocity under way."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Take this rank's half of whatever has a row for each of the batch."""
        del module
        if self.branches == 1:
            return args, kwargs
        with_rows = {key: x for key, x in kwargs.items() if key not in self.rowless}
        given = [x for x in (*args, *with_rows.values()) if isinstance(x, Tensor) and x.ndim]
        rows = given[0].shape[0]
        halves = {key: self._half(x, rows) for key, x in with_rows.items()}
        return tuple(self._half(x, rows) for x in args), {**kwargs, **halves}

    def _half(self, value: Any, rows: int) -> Any:
        start = dist.get_rank(self.group) * (rows // 2)
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
            return value.narrow(0, start, rows // 2)
        if isinstance(value, list | tuple) and len(value) == rows:
            return value[start : start + rows // 2]
        return value

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Join the halves."""
        del module, args
        if isinstance(output, tuple):
            return tuple(self._joined(x) for x in output)
        return self._joined(output)

    def _joined(self, value: Any) -> Any:
        if isinstance(value, list):  # of rows
            return list(self._joined(torch.stack(value)).unbind(0))
        if self.branches == 1:
            return collectives.share(value, dist.get_world_size(self.group))
        return collectives.gather(value, 0, self.group)


class BranchParallelDenoiser(Denoiser):
    """Another denoiser, whose branches run on two ranks."""

    def __init__(self, denoiser: Denoiser, group: Any) -> None:
        """Change the experts in place, which are adapted and sharded already.

        Raises:
            ValueError: the family does not run both branches as one batch.
        """
        if not denoiser.branches_as_batch:
            name = type(denoiser).__name__
            reason = (
                "has one branch at any guidance scale"
                if denoiser.branches(Guidance(scale=2.0)) == 1
                else "does not run both guidance branches as one batch"
            )
            msg = f"engine.cfg_parallel: {name} {reason}; take 1"
            raise ValueError(msg)
        self.denoiser = denoiser
        self._halves = _Halves(group, denoiser.rowless_inputs)
        for expert in denoiser.experts.values():
            expert.register_forward_pre_hook(self._halves.before, with_kwargs=True)
            expert.register_forward_hook(self._halves.after)

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """The denoiser's own."""
        return self.denoiser.experts

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The denoiser's own."""
        return self.denoiser.lora_targets

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        """Return the denoiser's own."""
        return self.denoiser.shard_units(expert)

    def sequence_plan(self, expert: nn.Module) -> SequencePlan | None:
        """Return the denoiser's own."""
        return self.denoiser.sequence_plan(expert)

    def expert_at(self, sigma: float) -> str:
        """Ask the denoiser."""
        return self.denoiser.expert_at(sigma)

    def route(self, step: int, schedule: FlowMatchSchedule) -> str:
        """Ask the denoiser."""
        return self.denoiser.route(step, schedule)

    def branches(self, guidance: Guidance) -> int:
        """Ask the denoiser."""
        return self.denoiser.branches(guidance)

    def single_branch(self, guidance: Guidance) -> Guidance:
        """Ask the denoiser."""
        return self.denoiser.single_branch(guidance)

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict as the denoiser does; the same on both ranks."""
        self._halves.branches = self.denoiser.branches(guidance)
        return self.denoiser.velocity(latents, step, conditioning, guidance)
