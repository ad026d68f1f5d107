"""What test_launched_runs.py lets torchrun start: `killed_save.py RUN OVERRIDES.json [RANK]`.

The given rank is gone in the middle of the second step's save; without one the run is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_core.testing.toys import register_toys
from omni_trainer.config import load_run
from omni_trainer.launched import is_follower
from omni_trainer.launched.follow import driving, follow
from omni_trainer.run import run_training


def die_in_save(number: int) -> None:
    """Kill this process where it would write its tensors for the *number*th time."""
    from omni_engine_fsdp import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter
    write, left = writer.write_data, [number]

    def write_or_die(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **kwargs)

    writer.write_data = write_or_die


def main(run_dir: Path, overrides: Sequence[str], killed: str | None) -> int:
    """Drive, or follow."""
    register_toys()
    if killed == os.environ["RANK"]:
        die_in_save(2)
    if is_follower():
        return follow()
    loaded = load_run("smoke", [*overrides, "trainer.steps=2"])
    resume = killed is None
    with driving():
        run_training(loaded.config, run_dir=run_dir, resume=resume, resolved=loaded.resolved)
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), *(sys.argv[3:] or [None])
        )
    )
