"""`omni metrics`: the dictionary of what a run reports."""

from __future__ import annotations

import sys

from omni_trainer.commands.terminal import print_table
from omni_trainer.reporting.metric_names import METRICS, table_of_metrics


def metrics(text: str, *, markdown: bool) -> int:
    """Print every metric whose name holds *text*; 1 if there is none.

    Args:
        text: Part of a name; empty takes all.
        markdown: As docs/metrics.md has it, all of them.
    """
    if markdown:
        print("\n".join(table_of_metrics()).strip())
        return 0
    found = [metric for name, metric in METRICS.items() if text in name]
    if not found:
        print(f"no metric has {text!r} in its name; `omni metrics` lists all", file=sys.stderr)
        return 1
    rows = [(m.name, m.unit, m.means, m.healthy, m.when or "always") for m in found]
    print_table(["metric", "unit", "what it is", "healthy", "present"], rows)
    return 0
