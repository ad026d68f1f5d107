"""What test_launched.py lets torchrun start twice: `launched_ranks.py OUT TOY_RUN.yaml`.

Rank 0 tries a group of plain workers, then toy runs, then a failure, and leaves what it found in OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_core.testing.toys import register_toys
from omni_trainer.config import load_run
from omni_trainer.group import WorkerError
from omni_trainer.launched import is_follower
from omni_trainer.launched.follow import driving, follow
from omni_trainer.launched.group import LaunchedGroup
from omni_trainer.run import run_training
from omni_trainer.workers.process import Place


class Worker:
    """Answers with its rank."""

    def __init__(self, config: str, *, place: Place) -> None:
        self.config = config
        self.place = place

    def add(self, *numbers: int) -> list[Any]:
        return [self.config, self.place.rank, sum(numbers)]

    def make(self, count: int) -> Iterator[tuple[str, int]]:
        for i in range(count):
            yield f"rank {self.place.rank} makes {i}", 10 * self.place.rank + i

    def fail(self) -> None:
        if self.place.rank == 1:
            raise ValueError("x")

    def close(self) -> None:
        """Nothing is held."""


def make() -> LaunchedGroup:
    return LaunchedGroup(Worker, "told", device="cpu", threads=1, reward=None)


def calls() -> dict[str, Any]:
    """Every kind of call."""
    group = make()
    group.start()
    made = list(group.stream("make", [(1,), (2,)]))
    first, _, last = (item.ref for item in made)
    found = {
        "broadcast": group.broadcast("add", 1, 2),
        "stream": [[item.rank, item.info] for item in made],
        "scatter": group.scatter("add", [(1,), (2,)], [[first, last], [last, first]]),
        "call": group.call(1, "add", 5, refs=[first]),
        "get": group.get(last),
    }
    host = group._host
    assert host is not None
    held = len(host._objects)
    del made, first, last
    group.broadcast("add")
    found["let go"] = [held, len(host._objects)]
    group.shutdown()
    return found


def runs(out: Path, source: str) -> None:
    """Four toy steps, and two and two."""
    for name, parts in {"straight": [4], "resumed": [2, 4]}.items():
        for place, steps in enumerate(parts):
            loaded = load_run(source, [f"trainer.steps={steps}"])
            run_training(
                loaded.config,
                run_dir=out / name,
                resume=place > 0,
                resolved=loaded.resolved,
            )


def failure() -> str:
    """A rank that fails, as the driver tells it."""
    group = make()
    group.start()
    try:
        group.broadcast("fail")
    except WorkerError as error:
        return str(error)
    finally:
        group.shutdown()
    return ""


def main(out: Path, source: str) -> int:
    """Drive, or follow."""
    register_toys()
    if is_follower():
        return follow()
    with driving():
        found: dict[str, Any] = {"calls": calls()}
        runs(out, source)
        found["failure"] = failure()
        (out / "found.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
