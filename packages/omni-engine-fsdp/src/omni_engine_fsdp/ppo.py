"""Policy gradients of the reverse process: each (sample, step) pair is one action of the policy.

The velocity of a stored state gives the log-prob of the stored next state; the loss sees nothing
else. Letters: B samples, W trained steps of a sample, M pairs of a micro-batch, T steps.
"""

from __future__ import annotations

import attrs
import structlog
import torch
from tensordict import TensorDict
from torch import Tensor

from omni_core.choices import Policy
from omni_core.engine import (
    BatchOutput,
    LossFunction,
    LossInputs,
    StepPrediction,
    TrainBatch,
    needs_noise,
    needs_reference,
    needs_teacher,
)
from omni_core.reverse_step import Latents
from omni_engine_fsdp.accumulation import (
    AccumulatingEngine,
    Forward,
    moments,
    nothing,
    output_of,
)
from omni_engine_fsdp.kept_graphs import KeptForward, cut_kept
from omni_engine_fsdp.lora import teacher_adapter
from omni_engine_fsdp.micro_batch import MicroBatch, cut
from omni_engine_fsdp.model_inputs import ModelInputs, gather, score

log = structlog.get_logger()


class PPODiffusersFSDPEngine(AccumulatingEngine[MicroBatch]):
    """Trains on trajectories by the log-probs of their stochastic steps."""

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches, gradients accumulated, and synced once at each expert's last.

        Returns:
            Metrics of this rank's rows that count; with *forward_only* also log-probs of all rows.

        Raises:
            ValueError: no loss to train with, nothing to train on, or no teacher of a row.
            CallPlanError: ranks are about to make different calls.
            RuntimeError: an earlier call failed after its first backward.
        """
        batch, loss = self._begin(data, loss_function, forward_only=forward_only)
        asked = {"reference": needs_reference(loss), "teacher": needs_teacher(loss)}
        more = "".join(f" with {name}" for name, wanted in asked.items() if wanted)
        phase = ("predict" if forward_only else "train") + more
        teachers = len(self._checked_teachers(batch)) if asked["teacher"] else 1
        kept = [] if forward_only else self._kept_forwards(batch, teachers=teachers)
        group = self.mesh.group
        if kept:
            micro_batches = cut_kept(batch, kept, phase=f"{phase} on kept graphs", group=group)
        else:
            micro_batches = cut(
                batch,
                self.denoiser,
                size=self.engine_config.micro_batch_size,
                all_rows=forward_only,
                teachers=teachers,
                phase=phase,
                group=group,
            )
        log_probs = torch.full(batch.trajectory.step_indices.shape, torch.nan)
        done = []
        for micro_batch, forward in self._accumulate(
            micro_batches, loss, forward_only=forward_only
        ):
            done.append(forward)
            if forward_only:
                assert forward.log_probs is not None
                scores = forward.log_probs.float().cpu()
                log_probs[micro_batch.rows, micro_batch.columns] = scores
        return BatchOutput(metrics=moments(done), log_probs=log_probs if forward_only else None)

    def _kept_forwards(self, batch: TrainBatch, *, teachers: int) -> list[KeptForward]:
        """What sampling kept for this batch; nothing where the engine keeps no graphs."""
        if self.graphs is None:
            return []
        mistakes = {
            f"update {batch.update} of a rollout: its first one changed the weights": batch.update,
            f"{teachers} teachers: a kept forward has rows of several": teachers > 1,
        }
        for mistake, found in mistakes.items():
            if found:
                msg = f"engine.keep_graph: {mistake}"
                raise ValueError(msg)
        if not self.graphs.forwards:
            log.warning("engine.no_graph_kept", why="nothing was sampled since begin_rollout")
        return self.graphs.forwards

    def forward_step(
        self, micro_batch: MicroBatch, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one micro-batch forward.

        Returns:
            The objective's share, with graph (None without a loss), and metrics; with *forward_only*
            also the log-probs [1, M] of its pairs.
        """
        forward = self._forward(micro_batch, loss_function)
        said = output_of(forward)
        return forward.share, said if forward_only else attrs.evolve(said, log_probs=None)

    def _forward(self, micro_batch: MicroBatch, loss: LossFunction | None) -> Forward:
        inputs = self.prepare_model_inputs(micro_batch)
        reference = self._reference(inputs) if needs_reference(loss) else None
        teacher = self._teacher(inputs, micro_batch.teacher) if needs_teacher(loss) else None
        kept = micro_batch.velocity
        velocity = self._velocity(inputs) if kept is None else kept
        if micro_batch.dummy:
            return nothing(velocity, len(micro_batch.rows))
        current = self.prepare_model_outputs(inputs, velocity)
        log_probs = current.require_log_prob()
        data, rows = micro_batch.data, micro_batch.rows
        weights = data.weights[rows].to(log_probs)
        counts = weights > 0
        if loss is None:
            return Forward(share=None, log_probs=log_probs.detach(), metrics={}, counts=counts)
        if data.step_weights is not None:
            weights = weights * data.step_weights[rows, micro_batch.columns].to(log_probs)
        terms = loss(
            LossInputs(
                current=current,
                reference=reference,
                teacher=teacher,
                teacher_place=micro_batch.teacher,
                noise=self._noise(micro_batch) if needs_noise(loss) else None,
                old_log_probs=data.trajectory.log_probs[rows, micro_batch.columns].to(log_probs),
                advantages=data.advantages[rows].to(log_probs),
                weights=weights,
                dt=(inputs.sigma_next.double() - inputs.sigma.double()).to(
                    log_probs.device, log_probs.dtype
                ),
            )
        )
        return Forward(
            share=self._share(terms, weights, weights > 0, data.denominator),
            log_probs=log_probs.detach(),
            metrics=terms.metrics,
            counts=counts,
        )

    def prepare_model_inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Gather what the denoiser takes: stored states, sigmas and conditioning of M pairs."""
        return gather(
            micro_batch.data.trajectory,
            micro_batch.schedule,
            micro_batch.rows,
            micro_batch.steps,
            self.device,
        )

    def prepare_model_outputs(self, inputs: ModelInputs, velocity: Latents) -> StepPrediction:
        """Score the stored next states under the policy that predicted *velocity* [M, ...]."""
        return score(inputs, velocity)

    def _velocity(self, inputs: ModelInputs) -> Latents:
        return self.denoiser.velocity(
            inputs.latents, inputs.step, inputs.conditioning, inputs.guidance
        )

    def _noise(self, micro_batch: MicroBatch) -> Latents:
        """What the rollout drew the pairs' steps with, from the samples' seeds."""
        drawn = micro_batch.data.trajectory.drawn_noise(micro_batch.rows, micro_batch.steps)
        return {name: value.to(self.device) for name, value in drawn.items()}

    def _teacher(self, inputs: ModelInputs, place: int) -> StepPrediction:
        name = list(self.teachers)[place]
        with torch.no_grad(), self.use_adapter(teacher_adapter(name)):
            return self.prepare_model_outputs(inputs, self._velocity(inputs))

    def _checked_teachers(self, batch: TrainBatch) -> tuple[str, ...]:
        """Names of the teachers, each row's among them."""
        names = tuple(self.teachers)
        if not names:
            msg = "the loss looks at a teacher, and this engine has none: add_teacher, before initialize"
            raise ValueError(msg)
        places = batch.teachers
        if places is None and len(names) > 1:
            msg = f"rows have to say whose they are: there are teachers {', '.join(names)}"
            raise ValueError(msg)
        if places is not None and not bool(((places >= 0) & (places < len(names))).all()):
            msg = f"rows have teachers {sorted(set(places.tolist()))}; there are {len(names)}"
            raise ValueError(msg)
        return names

    def _reference(self, inputs: ModelInputs) -> StepPrediction:
        with torch.no_grad(), self.use_policy(Policy.REFERENCE):
            return self.prepare_model_outputs(inputs, self._velocity(inputs))
