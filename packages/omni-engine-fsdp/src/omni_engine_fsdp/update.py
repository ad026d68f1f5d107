"""An update of the trained weights: clip, step, schedule, and the moving average that follows.

The optimizer's moments lie in host memory between its steps where `engine.offload` says so.
"""

from __future__ import annotations

import math

import structlog
import torch
from torch import Tensor
from torch.optim import Optimizer

from omni_core.engine import NonFiniteGradientsError, OptimizerReport
from omni_core.options import EMAConfig, OptimizerConfig
from omni_engine_fsdp.lora import DEFAULT
from omni_engine_fsdp.optimizer import clip_gradients, set_rate
from omni_engine_fsdp.options import FSDPEngineConfig, Offload
from omni_engine_fsdp.policies import EMA
from omni_engine_fsdp.weights import WeightsMixin

log = structlog.get_logger()


class UpdateMixin(WeightsMixin):
    """The optimizer of an engine, its schedule and its counts."""

    engine_config: FSDPEngineConfig
    optimizer_config: OptimizerConfig | None
    device: torch.device
    optimizer: Optimizer | None = None
    weight_version: int = 0
    """Optimizer steps taken; kept by checkpoints, so that it only grows."""
    schedule_steps: int = 0
    """How far the learning rate's schedule is."""
    nonfinite_steps: int = 0
    """Updates skipped for a non-finite gradient since the last one that was taken."""
    ema_updates: int = 0
    """Times that the moving average was brought nearer to the trained policy."""

    def end_rollout(self) -> None:
        """Drop what was kept of sampling."""
        raise NotImplementedError

    def _optimizer(self) -> tuple[Optimizer, OptimizerConfig]:
        if self.optimizer is None or self.optimizer_config is None:
            msg = "this engine only predicts: it was built without an optimizer config"
            raise RuntimeError(msg)
        return self.optimizer, self.optimizer_config

    def optimizer_step(self) -> OptimizerReport:
        """Clip by the global norm and step, unless a gradient of any rank is not finite.

        Raises:
            NonFiniteGradientsError: more than `optimizer.max_nonfinite_steps` in a row were skipped.
            RuntimeError: there is no optimizer, or no gradient at all.
        """
        optimizer, config = self._optimizer()
        self.prepare_weights()
        trained = [p for p in self.trained().values() if p.grad is not None]
        if not trained:
            msg = "optimizer_step: no parameter has a gradient; run forward_backward_batch first"
            raise RuntimeError(msg)
        norm = clip_gradients(trained, config.max_grad_norm)
        rate = float(optimizer.param_groups[0]["lr"])
        self.end_rollout()  # graphs of other weights than those that follow
        if math.isfinite(norm):
            self._step(optimizer)
            self.weight_version += 1
            self._update_average(config.ema)
            self.nonfinite_steps = 0
            return OptimizerReport(grad_norm=norm, stepped=True, lr=rate)
        self.optimizer_zero_grad()
        self.nonfinite_steps += 1
        log.warning("engine.step_skipped", grad_norm=norm, in_a_row=self.nonfinite_steps)
        if self.nonfinite_steps > config.max_nonfinite_steps:
            msg = (
                f"{self.nonfinite_steps} updates in a row had a non-finite gradient "
                f"(optimizer.max_nonfinite_steps is {config.max_nonfinite_steps}); weights are those "
                f"of version {self.weight_version}"
            )
            raise NonFiniteGradientsError(msg)
        return OptimizerReport(grad_norm=norm, stepped=False, lr=rate)

    def _step(self, optimizer: Optimizer) -> None:
        if self.engine_config.offload is Offload.OPTIMIZER:
            self._move_moments(self.device)
        optimizer.step()
        self.rest_moments()

    def rest_moments(self) -> None:
        """Put the optimizer's moments where they are between its steps."""
        if self.engine_config.offload is Offload.OPTIMIZER:
            self._move_moments(torch.device("cpu"))

    def _move_moments(self, device: torch.device) -> None:
        if self.optimizer is not None:
            for moments in self.optimizer.state.values():
                for name, value in moments.items():
                    if isinstance(value, Tensor) and name != "step":
                        moments[name] = value.to(device)

    def _update_average(self, config: EMAConfig | None) -> None:
        if config is not None and self.weight_version % config.every == 0:
            self.ema_update_adapter(DEFAULT, EMA, config.decay_after(self.ema_updates))
            self.ema_updates += 1

    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""
        for parameters in self.parameters.values():
            for parameter in parameters.values():
                parameter.grad = None

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step; returns the new rate."""
        optimizer, config = self._optimizer()
        self.schedule_steps += 1
        rate = config.rate(self.schedule_steps)
        set_rate(optimizer, rate)
        return rate

    @property
    def rate(self) -> float:
        """Learning rate at the schedule's present place."""
        _, config = self._optimizer()
        return config.rate(self.schedule_steps)
