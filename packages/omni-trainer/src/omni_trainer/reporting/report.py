"""`omni report`: a run as one HTML file that needs no server and no network, readable in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from omni_trainer.diagnosis import diagnose
from omni_trainer.reporting import report_parts as parts
from omni_trainer.reporting.plot import SMOOTH
from omni_trainer.run_directory import write_text
from omni_trainer.run_record import RunRecord

FILE = "report.html"


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report of a run directory; returns the file.

    Args:
        run: The directory, of a run in any state.
        output: The file; None is report.html in the run directory.

    Raises:
        RunDirectoryError: it holds no run.
    """
    target = output or run / FILE
    write_text(target, render(RunRecord(run)))
    return target


def render(record: RunRecord) -> str:
    """Write the page. Every text of the run (prompts, names, errors) is escaped."""
    environment = Environment(
        loader=PackageLoader("omni_trainer.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    return environment.get_template("report.html").render(_context(record))


def prose(text: str) -> Markup:
    """Escape *text* and set what stands between backticks as code."""
    parts = (
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(text.split("`"))
    )
    return Markup("").join(parts)


def _context(record: RunRecord) -> dict[str, Any]:
    settings = parts.settings(record)
    return {
        "name": record.path.absolute().name,
        "state": record.state,
        "trained": record.trained,
        "planned": record.planned,
        "facts": list(parts.facts(record)),
        "gain": record.gain,
        "heldout": record.evaluations[-1] if record.evaluations else None,
        "compared": [
            parts.when(each.step) for each in record.evaluations[:1] + record.evaluations[-1:]
        ],
        "findings": diagnose(record),
        "reward": parts.reward_chart(record),
        "smoothed": len(record.series("reward/mean")) >= SMOOTH,
        "smooth": SMOOTH,
        "shown": parts.before_after(record),
        "grid": parts.last_grid(record),
        "prompts": parts.prompt_rows(record),
        "groups": parts.curves(record),
        "timings": parts.timings(record),
        "settings": settings,
        "changed": [one for one in settings if one.changed],
        "environment": record.environment,
    }
