"""A training engine on DistributedDataParallel: every rank holds all weights and trains rows of its own.

What an engine of several ranks has to keep beyond one of a single process: gradients are synced once in
an update, a gradient is that of the whole objective however rows are dealt, one rank writes, and a rank
that cannot take part is an error instead of a hang.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from omni_core import BatchOutput, LossFunction, TrainBatch
from omni_core.testing.toys import ToyDenoiser, ToyEngine


class DDPEngine(ToyEngine):
    """Trains the toy family on all ranks of the process group that it finds; on one without any."""

    parallel: DistributedDataParallel | None = None
    """The denoiser's module, wrapped; None on one rank."""

    def initialize(self) -> None:
        """Make the model, and wrap the denoiser's module; optimizer and names stay those of the module."""
        super().initialize()
        if self.get_data_parallel_size() > 1:
            assert isinstance(self.denoiser, ToyDenoiser)
            self.parallel = DistributedDataParallel(self.module)
            self.denoiser = _Wrapped(self.denoiser, self.parallel)

    # -- gradients ---------------------------------------------------------------------------------

    def syncing_gradients(self, *, last: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward of the last micro-batch alone."""
        return nullcontext() if last or self.parallel is None else self.parallel.no_sync()

    def forward_step(
        self, micro_batch: Any, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Scale the share up: DDP averages over ranks, and the denominator is that of all of them."""
        share, output = super().forward_step(micro_batch, loss_function, forward_only=forward_only)
        return None if share is None else share * self.get_data_parallel_size(), output

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches; ranks may have different numbers of them, but each needs one.

        Raises:
            ValueError: a rank has no row, and would leave the others waiting for its gradients.
        """
        if self.parallel is not None and not forward_only:
            fewest = torch.tensor(TrainBatch.of(data).trajectory.rows)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
            if fewest == 0:
                msg = "a rank has no row of this update: deal at least one to each"
                raise ValueError(msg)
        return super().forward_backward_batch(data, loss_function, forward_only=forward_only)

    # -- ranks -------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """Among all ranks."""
        return dist.get_rank() if dist.is_initialized() else 0

    def get_data_parallel_size(self) -> int:
        """All ranks: each has rows of its own."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def get_data_parallel_group(self) -> Any:
        """All ranks; None for one."""
        return dist.group.WORLD if self.get_data_parallel_size() > 1 else None

    # -- files -------------------------------------------------------------------------------------

    @property
    def writes_files(self) -> bool:
        """The first rank does."""
        return self.get_data_parallel_rank() == 0

    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write on the first rank; all are done when any returns."""
        state = super().save_checkpoint(directory)
        self._wait_for_all()
        return state

    def export_adapter(self, directory: Path, *, adapter: str = "default") -> Path:
        """Write on the first rank; all are done when any returns."""
        path = super().export_adapter(directory, adapter=adapter)
        self._wait_for_all()
        return path

    def _wait_for_all(self) -> None:
        if self.parallel is not None:
            dist.barrier()


class _Wrapped(ToyDenoiser):
    """Calls the wrapped module, and names the one inside."""

    def __init__(self, stock: ToyDenoiser, parallel: DistributedDataParallel) -> None:
        super().__init__(stock.transformer, stock.dtype)
        self._module = stock.transformer
        self.transformer = parallel

    @property
    def experts(self):
        """`transformer`, as it is named without ranks."""
        return {"transformer": self._module}
