"""What test_launched_runs.py lets torchrun start twice: `launched_runs.py OUT OVERRIDES.json`.

Every layout trains two steps, and one of them one and one; all in the same two processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_core.testing.toys import register_toys
from omni_trainer.config import load_run
from omni_trainer.launched import is_follower
from omni_trainer.launched.follow import driving, follow
from omni_trainer.run import run_training

LAYOUTS = {
    "data": ["engine.shard_base=shard"],
    "sequence": ["engine.ulysses=2", "engine.shard_base=shard"],
    "branches": ["engine.cfg_parallel=2"],
}
RESUMED = "sequence"
"""The layout that is trained in two parts, too."""


def train(run_dir: Path, overrides: Sequence[str], steps: Sequence[int] = (2,)) -> Path:
    """Train up to each of *steps*, going on from the checkpoint that was there."""
    for place, last in enumerate(steps):
        loaded = load_run("smoke", [*overrides, f"trainer.steps={last}"])
        run_training(loaded.config, run_dir=run_dir, resume=place > 0, resolved=loaded.resolved)
    return run_dir


def main(out: Path, overrides: Sequence[str]) -> int:
    """Drive, or follow."""
    register_toys()
    if is_follower():
        return follow()
    with driving():
        for layout, options in LAYOUTS.items():
            train(out / layout, [*overrides, *options])
        train(out / "resumed", [*overrides, *LAYOUTS[RESUMED]], (1, 2))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
