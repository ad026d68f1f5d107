"""Workers on Ray: the only place that knows it.

Ray is started on loopback and without a dashboard, unless a cluster is given (`trainer.ray_address`, or
RAY_ADDRESS). Importing this package imports no ray; its modules do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_trainer.rpc import environment

if TYPE_CHECKING:
    from omni_trainer.config import RunConfig
    from omni_trainer.run_workers import RunWorkers
    from omni_trainer.workers.rank import ActorRolloutRefConfig

environment.prepare()


def ray_workers(config: RunConfig, worker: ActorRolloutRefConfig) -> RunWorkers:
    """Describe session, ranks, scorers and rollout servers of a run on Ray; none is started.

    Raises:
        ModuleNotFoundError: the extra `ray` is not installed.
    """
    environment.prepare(config.trainer.ray_address)
    try:
        from omni_trainer.rpc.workers import describe_workers
    except ModuleNotFoundError as exc:
        if exc.name != "ray":
            raise
        msg = "trainer.backend=ray needs Ray: pip install omni-trainer[ray]"
        raise ModuleNotFoundError(msg, name="ray") from exc
    return describe_workers(config, worker)
