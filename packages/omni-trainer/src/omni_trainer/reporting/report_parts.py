"""What a report shows of a run, as plain values: curves, pictures, timings, what was configured."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from omni_core import config as core
from omni_core.config import ConfigError
from omni_core.plugins import PluginError, PluginNotFoundError
from omni_trainer.config import load_run
from omni_trainer.evaluation import Evaluation, PromptScores
from omni_trainer.reporting.charts import Line, chart, number
from omni_trainer.reporting.intervals import bootstrap
from omni_trainer.reporting.metric_names import Metric, describe
from omni_trainer.reporting.plot import SMOOTH, running_mean
from omni_trainer.run_record import RunRecord

SMALL = 128
"""Pixels: pictures up to this width stay as they are (PNG), larger ones are sent as JPEG."""
FIRST = ("heldout", "reward", "advantage", "actor", "canary")
"""Groups in the order in which people look at them; others follow."""
COMMAND_LINE = "command line"
EDITED = "edited in config.yaml"
_RECIPE = "recipe "

# -- curves -----------------------------------------------------------------------------------------


def reward_chart(record: RunRecord) -> Markup | None:
    """Training reward, each step and its running mean, and the held-out one with its interval."""
    points = record.series("reward/mean")
    lines = [Line(points=points, style="faint" if len(points) >= SMOOTH else "main")]
    if len(points) >= SMOOTH:
        means = running_mean([value for _, value in points])
        steps = [step for step, _ in points[SMOOTH - 1 :]]
        lines.append(Line(points=list(zip(steps, means, strict=True))))
    intervals = [
        (each.step, bootstrap([p.mean for p in each.prompts if p.rewards]))
        for each in record.evaluations
        if any(p.rewards for p in each.prompts)
    ]
    if not points and not intervals:
        return None
    return chart(lines, intervals, title="reward over the steps", width=860, height=300)


@attrs.frozen(kw_only=True)
class Curve:
    """One metric."""

    name: str
    means: Metric | None
    last: str
    svg: Markup | None
    """None of a metric that never changes: `last` is its value."""


def curves(record: RunRecord) -> dict[str, list[Curve]]:
    """Every metric but the seconds, by group; those that never change come last."""
    groups: dict[str, list[Curve]] = {}
    for name in record.names:
        group = name.partition("/")[0]
        if not _is_seconds(name):
            groups.setdefault(group, []).append(_curve(record, name))
    ordered = sorted(
        groups,
        key=lambda group: (group not in FIRST, FIRST.index(group) if group in FIRST else 0, group),
    )
    return {group: sorted(groups[group], key=lambda curve: curve.svg is None) for group in ordered}


def _curve(record: RunRecord, name: str) -> Curve:
    points = record.series(name)
    changes = len({value for _, value in points}) > 1
    svg = chart([Line(points=points)], title=f"{name} over the steps") if changes else None
    return Curve(name=name, means=describe(name), last=number(points[-1][1]), svg=svg)


# -- pictures ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Shown:
    """One held-out prompt: its first sample at the evaluations that are shown."""

    prompt: str
    target: str | None
    pictures: Sequence[tuple[str, str, float | None]]
    """(caption, data URI, mean reward of the prompt)."""


def before_after(record: RunRecord) -> list[Shown]:
    """Prompts with their picture before and after, or of the one evaluation that there is."""
    chosen = record.first_and_last_pictures()
    if not chosen:
        return []
    places = [
        {prompt.row_id: place for place, prompt in enumerate(each.prompts[: len(images)])}
        for each, images in chosen
    ]
    shown = []
    for prompt in chosen[0][0].prompts[: len(chosen[0][1])]:
        if not all(prompt.row_id in own for own in places):
            continue  # a resume may have evaluated other prompts
        pictures = []
        for (evaluation, images), own in zip(chosen, places, strict=True):
            scores = evaluation.prompts[own[prompt.row_id]]
            reward = scores.mean if scores.rewards else None
            uri = data_uri(images[own[prompt.row_id]])
            pictures.append((_caption(evaluation), uri, reward))
        shown.append(Shown(prompt=prompt.prompt, target=prompt.target, pictures=pictures))
    return shown


def _caption(evaluation: Evaluation) -> str:
    return when(evaluation.step)


def when(step: int) -> str:
    """Say when an evaluation was made."""
    return f"after {step} step{'s' * (step != 1)}" if step else "before"


def data_uri(image: NDArray[np.uint8]) -> str:
    """Write a picture uint8 [H, W, 3] into the page itself."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    kind = "PNG" if picture.width <= SMALL else "JPEG"
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def last_grid(record: RunRecord) -> tuple[str, str] | None:
    """(name, data URI) of the newest grid of training samples: what a run without evaluation shows."""
    found = sorted(record.run.grids.glob("train-step-*.png"))
    if not found:
        return None
    return found[
        -1
    ].stem, f"data:image/png;base64,{base64.b64encode(found[-1].read_bytes()).decode()}"


def prompt_rows(record: RunRecord) -> list[tuple[PromptScores, float | None, float | None]]:
    """(prompt, mean reward before, after) of all held-out prompts; the largest change first."""
    if not record.evaluations:
        return []
    first, last = record.evaluations[0], record.evaluations[-1]
    later = {prompt.row_id: prompt for prompt in last.prompts}
    rows = []
    for prompt in first.prompts:
        other = later.get(prompt.row_id)
        after = other.mean if other is not None and other.rewards and last is not first else None
        rows.append((prompt, prompt.mean if prompt.rewards else None, after))
    return sorted(rows, key=lambda row: (row[1] or 0.0) - (row[2] or 0.0))


# -- timings ----------------------------------------------------------------------------------------

WITHIN = {"time/decode": "time/sample", "time/reward": "time/sample"}
"""Phases that are part of another one, or go on beside it."""


@attrs.frozen(kw_only=True)
class Timing:
    """One phase over the whole run."""

    name: str
    means: str
    median: float
    total: float
    share: float
    """Of the longest phase: the length of its bar."""
    within: bool


def timings(record: RunRecord) -> list[Timing]:
    """Every phase, in the dictionary's order."""
    names = [name for name in record.names if _is_seconds(name)]
    totals = {name: sum(value for _, value in record.series(name)) for name in names}
    longest = max(totals.values(), default=0.0) or 1.0
    found = []
    for name in sorted(names, key=_order):
        metric, middle = describe(name), record.median(name)
        found.append(
            Timing(
                name=name.partition("/")[2],
                means="" if metric is None else metric.means,
                median=0.0 if middle is None else middle,
                total=totals[name],
                share=totals[name] / longest,
                within=name in WITHIN,
            )
        )
    return found


def _is_seconds(name: str) -> bool:
    metric = describe(name)
    return name.startswith("time/") and (metric is None or metric.unit == "s")


def _order(name: str) -> int:
    from omni_trainer.reporting.metric_names import METRICS

    known = list(METRICS)
    return known.index(name) if name in known else len(known)


# -- configuration ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Setting:
    """One value of the config."""

    path: str
    value: str
    source: str
    was: str | None = None
    """What the recipe says of a value that the command line set, or what the run was started with of one
    that was edited later; None where that is not known."""

    @property
    def changed(self) -> bool:
        """Whether the command line made it another value than the recipe's, or an edit than the run's."""
        return self.source in (COMMAND_LINE, EDITED) and self.was != self.value


def base_of(record: RunRecord) -> str:
    """Name the recipe or file that the run was started from."""
    named = [source for source in record.sources.values() if source.startswith(_RECIPE)]
    others = [s for s in record.sources.values() if s not in ("default", COMMAND_LINE)]
    return (named or others or ["the defaults"])[0]


def settings(record: RunRecord) -> list[Setting]:
    """Every value of the resolved config with its source."""
    known = _recipe_values(base_of(record))
    found = []
    for path, value in core.leaves(record.config):
        source = record.sources.get(path, "config.yaml")
        was = str(known[path]) if source == COMMAND_LINE and path in known else None
        if record.started_with.get(path, value) != value:
            source, was = EDITED, str(record.started_with[path])
        found.append(Setting(path=path, value=str(value), source=source, was=was))
    return found


def _recipe_values(base: str) -> dict[str, Any]:
    if base.startswith(_RECIPE):
        # The recipe may not be installed where the report is made.
        with contextlib.suppress(ConfigError, PluginError, PluginNotFoundError):
            loaded = load_run(base.removeprefix(_RECIPE))
            return dict(core.leaves(core.unstructure(loaded.config)))
    return {}


def facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield what the run is, for the head of the page."""
    setting = record.setting
    yield "algorithm", str(setting("algorithm.name", "?"))
    yield "reward", str(setting("reward.name", "none"))
    yield "model", str(setting("model.path", "?"))
    prompts, samples = setting("data.prompts_per_step"), setting("rollout.samples_per_prompt")
    if prompts and samples:
        yield "samples a step", f"{prompts} prompts x {samples}"
    if record.ranks:
        devices = ", ".join(sorted({str(rank.get("device", "?")) for rank in record.ranks}))
        yield "ranks", f"{len(record.ranks)} on {devices}"
    yield "started from", base_of(record)
