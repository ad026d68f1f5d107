"""`omni report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path


def report(run: str, *, output: str | None) -> int:
    """Write the report and say where it is."""
    from omni_trainer.reporting.report import write_report

    print(write_report(Path(run), None if output is None else Path(output)))
    return 0
