"""`omni doctor RUN`: what a run shows, the weightiest first, with the evidence and what to do."""

from __future__ import annotations

from pathlib import Path

from omni_trainer.commands.terminal import console
from omni_trainer.diagnosis import diagnose, explains
from omni_trainer.run_record import RunRecord

HEALTHY, FOUND = 0, 1


def examine(run: str) -> int:
    """Print the findings; 1 if one of them stands between the run and learning, 0 otherwise."""
    record = RunRecord(Path(run))
    found = diagnose(record)
    screen = console()
    done = f"{record.trained} of {record.planned} steps"
    screen.print(f"{run}: {record.state}, {done}", markup=False)
    if not found:
        screen.print("nothing found", markup=False)
    for number, one in enumerate(found, 1):
        screen.print()
        screen.print(
            f"{number}. {one.symptom.title} ({one.symptom.weight.name.lower()}, {one.symptom.key})",
            style="bold",
            markup=False,
        )
        for text in (one.evidence, one.symptom.means, f"To do: {one.symptom.todo}"):
            screen.print(f"   {text}", markup=False)
    return FOUND if explains(found) else HEALTHY
