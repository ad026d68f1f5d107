"""Diffusion-DPO, online: of each prompt's samples the best is preferred to the worst.

With d = mean_D (v - (x1 - x0))^2 at the same noise and sigma for both samples of a pair,

    L = -log sigmoid(-b/2 [(d - d_ref)_best - (d - d_ref)_worst]),

the mean over pairs: both rows of a pair carry its loss. The implicit reward of a row is -b/2 (d -
d_ref). Source: Diffusion-DPO, arXiv 2311.12908 (b = 5000 there, 2000 usual, about 100 online).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from omni_core.advantages import GroupAdvantages, group_advantages
from omni_core.algorithms.base import ForwardAlgorithm, rows_of_units
from omni_core.algorithms.diffusion_dpo_options import DiffusionDPOOptions
from omni_core.choices import AdvantageStd
from omni_core.engine import LossTerms
from omni_core.forward_process import ForwardLossInputs, denoising_error


@attrs.frozen(kw_only=True, eq=False)
class DPOTerms:
    """What Diffusion-DPO is for each of P pairs; only `loss` carries a gradient."""

    loss: Tensor
    """[P]."""
    chosen_reward: Tensor
    """[P]: implicit reward of the better sample."""
    rejected_reward: Tensor
    """[P]: of the worse one."""

    def metrics(self) -> dict[str, Tensor]:
        """Scalars over these pairs: `dpo_loss`, `implicit_acc` (pairs that the implicit reward orders
        as the scores do), and the means of the implicit rewards: `chosen`, `rejected`, `margins`."""
        margin = self.chosen_reward - self.rejected_reward
        return {
            "dpo_loss": self.loss.detach().mean(),
            "implicit_acc": (margin > 0).to(margin).mean(),
            "chosen": self.chosen_reward.mean(),
            "rejected": self.rejected_reward.mean(),
            "margins": margin.mean(),
        }


def dpo_terms(
    chosen_error: Tensor,
    rejected_error: Tensor,
    chosen_reference: Tensor,
    rejected_reference: Tensor,
    *,
    beta: float,
) -> DPOTerms:
    """Diffusion-DPO of P pairs.

    Args:
        chosen_error: [P], d of the better samples, with graph.
        rejected_error: [P], d of the worse ones, with graph.
        chosen_reference: [P], d_ref of the better samples.
        rejected_reference: [P], d_ref of the worse ones.
        beta: b > 0.

    Raises:
        ValueError: shapes that differ, or beta not above 0.
    """
    shapes = {tuple(e.shape) for e in (chosen_error, rejected_error)}
    shapes |= {tuple(e.shape) for e in (chosen_reference, rejected_reference)}
    if len(shapes) != 1 or chosen_error.ndim != 1 or not beta > 0.0:
        raise ValueError(f"errors must be [P] alike, got {sorted(shapes)}; beta {beta} above 0")
    chosen = -0.5 * beta * (chosen_error - chosen_reference.detach())
    rejected = -0.5 * beta * (rejected_error - rejected_reference.detach())
    return DPOTerms(
        loss=-logsigmoid(chosen - rejected),
        chosen_reward=chosen.detach(),
        rejected_reward=rejected.detach(),
    )


def online_dpo_pairs(
    scores: Tensor, group_ids: Sequence[Hashable], *, valid: Tensor | None = None
) -> Tensor:
    """The best and the worst row of each group, by its score; ties go to the first row.

    Args:
        scores: [B].
        group_ids: One for each row, in any order.
        valid: bool [B], False where a row was not scored.

    Returns:
        int64 [2 P]: best and worst of one group after the other, groups in the order of their first
        row. A group of one scored row, or whose scores are equal up to rounding, has no pair.

    Raises:
        ValueError: as `group_advantages`.
    """
    centred = group_advantages(
        scores, group_ids, valid=valid, std=AdvantageStd.NONE, clip=None
    ).advantages.tolist()
    values: list[float] = scores.tolist()
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        # A centred score of 0 in a group that says something is neither best nor worst of it.
        if centred[row] != 0.0:
            members.setdefault(group, []).append(row)
    order = {group: place for place, group in reversed(list(enumerate(group_ids)))}
    pairs: list[int] = []
    for group in sorted(members, key=order.__getitem__):
        rows = members[group]
        pairs.append(max(rows, key=lambda row: (values[row], -row)))
        pairs.append(min(rows, key=lambda row: (values[row], row)))
    return torch.tensor(pairs, dtype=torch.int64)


class DiffusionDPO(ForwardAlgorithm):
    """See the module's docstring."""

    options: DiffusionDPOOptions

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """1 for the best sample of a group, -1 for the worst, 0 for the rest."""
        found = group_advantages(rewards, group_ids, valid=valid, std=AdvantageStd.NONE, clip=None)
        chosen = torch.zeros_like(found.advantages)
        pairs = online_dpo_pairs(rewards, group_ids, valid=valid)
        chosen[pairs[0::2]] = 1.0
        chosen[pairs[1::2]] = -1.0
        return attrs.evolve(found, advantages=chosen)

    @property
    def shares_draws(self) -> bool:
        """A pair is compared at one noise and sigma."""
        return True

    def units(
        self, advantages: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> tuple[tuple[int, ...], ...]:
        """Pairs; all other rows are left out.

        Raises:
            ValueError: a group without exactly one best and one worst sample.
        """
        pairs: dict[str, dict[float, list[int]]] = {}
        values: list[float] = advantages.tolist()
        for row, (value, group, ok) in enumerate(
            zip(values, group_ids, valid.tolist(), strict=True)
        ):
            if ok and value != 0.0:
                pairs.setdefault(group, {}).setdefault(value, []).append(row)
        for group, found in pairs.items():
            if {value: len(rows) for value, rows in found.items()} != {1.0: 1, -1.0: 1}:
                sizes = {value: len(rows) for value, rows in found.items()}
                msg = (
                    f"group {group!r}: a pair is one row of advantage 1 and one of -1, got {sizes} "
                    "(advantage: rows)"
                )
                raise ValueError(msg)
        return tuple((found[1.0][0], found[-1.0][0]) for found in pairs.values())

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """Both rows of a pair carry its loss."""
        best, worst = self._pairs(inputs)
        error = denoising_error(inputs.current, inputs.clean, inputs.noise)
        reference = denoising_error(self.reference(inputs), inputs.clean, inputs.noise)
        pairs = dpo_terms(
            error[best], error[worst], reference[best], reference[worst], beta=self.options.beta
        )
        margin = pairs.chosen_reward - pairs.rejected_reward
        place, _ = rows_of_units(inputs.unit)
        place = place.to(error.device)
        metrics = {
            "implicit_accuracy": (margin > 0).to(error)[place],
            "implicit_margin": margin[place],
            "denoising_error": error.detach(),
        }
        return self.finish(inputs, pairs.loss[place], metrics)

    def _pairs(self, inputs: ForwardLossInputs) -> tuple[Tensor, Tensor]:
        """int64 [P] each: the better and the worse row of every unit, in the order of their numbers."""
        place, sizes = rows_of_units(inputs.unit)
        signs = torch.sign(inputs.advantages.detach()).cpu()
        sums = torch.zeros(len(sizes), dtype=signs.dtype).index_add(0, place, signs)
        if (sizes != 2).any() or (signs == 0).any() or (sums != 0).any():
            msg = (
                "rows come in pairs, one of advantage above and one below 0; got units of "
                f"{sizes.tolist()} rows with advantages {inputs.advantages.tolist()}"
            )
            raise ValueError(msg)
        better, worse = (signs > 0).nonzero().flatten(), (signs < 0).nonzero().flatten()
        device = inputs.advantages.device
        best, worst = better[place[better].argsort()], worse[place[worse].argsort()]
        return best.to(device), worst.to(device)
