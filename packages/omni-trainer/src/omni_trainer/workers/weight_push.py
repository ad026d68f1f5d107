"""New weights for a rollout: pause, update, check that all was bound, resume."""

from __future__ import annotations

import structlog

from omni_core.options import LoRAConfig
from omni_core.rollout import BaseRollout, WeightMismatchError, WeightUpdate

log = structlog.get_logger()


def alpha_over_rank(lora: LoRAConfig | None) -> float | None:
    """Return an adapter's scale; None without one."""
    return None if lora is None else lora.alpha / lora.rank


def check_one_policy(rollout: str, policy: str) -> None:
    """Check that the trained policy is the one that samples: whole weights are pushed of one alone.

    Args:
        rollout: Its plugin's name.
        policy: Which samples.

    Raises:
        ValueError: another one samples.
    """
    if policy != "default":
        msg = (
            f"rollout.name: {rollout} is pushed one policy where every weight is trained, and "
            f"{policy!r} samples beside the trained one: sample with the trained module, or set model.lora"
        )
        raise ValueError(msg)


def push(rollout: BaseRollout, update: WeightUpdate) -> None:
    """Let *rollout* sample with an update.

    Raises:
        WeightMismatchError: what it bound is not what was sent; lists the names on both sides.
    """
    rollout.pause()
    report = rollout.update(update)
    if set(report.bound) != set(update.tensors):
        sent, bound = sorted(set(update.tensors) - set(report.bound)), sorted(report.bound)
        msg = f"the rollout did not bind {sent}; it bound {bound}"
        raise WeightMismatchError(msg)
    rollout.resume()
    log.info(
        "weights.pushed",
        version=update.version,
        adapter=update.adapter,
        nbytes=report.nbytes,
        seconds=report.seconds,
    )
