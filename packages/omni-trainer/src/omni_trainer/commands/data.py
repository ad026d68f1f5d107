"""`omni data check`: what a run's prompt files hold, before anything is started.

Exit code 1 where a row is bad (unless `data.on_bad_row=skip` leaves such rows out) or a held-out prompt is
also trained on; with `--strict` also where rows are left out, prompts repeat, or are longer than the model
reads. 2 where a file is missing or cannot be read at all, 0 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs

from omni_core import config as core
from omni_core import plugins, resources
from omni_core.config import ConfigError, PluginChoice
from omni_core.prompt_length import PromptLength
from omni_trainer.commands.terminal import print_table
from omni_trainer.config import DataConfig, RunConfig, engine_name, load_run
from omni_trainer.data.examine import FileReport, Spread, examine, in_both
from omni_trainer.data.prompts import load_prompts
from omni_trainer.data.rows import BadRowPolicy, PromptFile

OK, FAILED = 0, 1
SHOWN = 20
"""Lines of one kind that are printed."""

Lengths = Callable[[Sequence[str]], Sequence[PromptLength] | None]


@attrs.frozen(kw_only=True)
class _Subject:
    """What is looked at."""

    data: DataConfig
    reward: PluginChoice | None
    run: RunConfig | None
    """None for a file alone."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height that the run's model is run with."""
        pipeline = self.run and self.run.model.pipeline
        return (pipeline.width, pipeline.height) if pipeline else None


def check(
    source: str,
    overrides: Sequence[str],
    *,
    tokenizer: str | None = None,
    max_tokens: int | None = None,
    strict: bool = False,
) -> int:
    """Look at the files of a run, or at one file.

    Args:
        source: A recipe, a YAML file, or a prompt file.
        overrides: `dotted.key=value`; for a prompt file those of `data` and `reward`.
        tokenizer: Directory of the tokenizer that counts; None takes the run's model.
        max_tokens: That are read; None takes the tokenizer's own number.
        strict: Whether warnings fail the check too.
    """
    subject = _subject(source, overrides)
    lengths, why = _counter(subject.run, tokenizer, max_tokens)
    files = {"train": _load(subject.data.train, subject)}
    if subject.data.heldout is not None:
        files["heldout"] = _load(subject.data.heldout, subject)
    reports = {
        name: examine(file, lengths and lengths([row.prompt for row in file.rows]), subject.size)
        for name, file in files.items()
    }
    _print_reports(files, reports)
    if why:
        print(f"no token was counted: {why}")
    shared = in_both(files["train"], files["heldout"]) if "heldout" in files else ()
    return _tell(reports, shared, strict=strict, skips=subject.data.on_bad_row is BadRowPolicy.SKIP)


# -- what is looked at ------------------------------------------------------------------------------


def _subject(source: str, overrides: Sequence[str]) -> _Subject:
    if not _is_data(source):
        run = load_run(source, overrides).config
        return _Subject(data=run.data, reward=run.reward, run=run)
    values = dict(core.parse_overrides(overrides).values)
    others = sorted(values.keys() - {"data", "reward"})
    if others:
        known = "a prompt file takes data.* and reward.*; a recipe takes every key"
        raise ConfigError([f"{name}: {known}" for name in others])
    values["data"] = {**values.get("data", {}), "train": source}
    chosen = core.structure(values, _FileSections)
    return _Subject(data=chosen.data, reward=chosen.reward, run=None)


@attrs.frozen(kw_only=True)
class _FileSections:
    data: DataConfig
    reward: Annotated[PluginChoice, plugins.REWARDS] | None = None


def _is_data(source: str) -> bool:
    """A recipe has no suffix, and a run's file is YAML."""
    return not source.endswith((".yaml", ".yml")) and (
        "." in Path(source).name or "/" in source or Path(source).is_dir()
    )


def _load(path: str, subject: _Subject) -> PromptFile:
    """Read a file with its bad rows set aside, so that all of it is looked at."""
    from omni_trainer.rewards.build import build_reward

    reward = subject.reward
    return load_prompts(
        resources.resolve(path),
        reward=None if reward is None else build_reward(reward.name, reward.options),
        on_bad_row=BadRowPolicy.SKIP,
        columns=subject.data.columns,
        whole_images=True,
    )


def _counter(
    run: RunConfig | None, tokenizer: str | None, max_tokens: int | None
) -> tuple[Lengths | None, str]:
    """Return what counts tokens, or why nothing does."""
    if tokenizer is not None:
        from omni_trainer.data.tokens import TokenCounter

        return TokenCounter(Path(tokenizer), max_tokens), ""
    if run is None:
        return None, "no --tokenizer"
    actor = run.actor()
    plugin = plugins.registry(plugins.ENGINES).get(engine_name(run.algorithm_options, run.engine))
    try:
        engine = plugin.build(actor.model, actor.engine, None, None)
        if engine.prompt_lengths([""]) is None:
            return None, f"the engine of {run.model.path!r} cannot say how it reads prompts"
    except (FileNotFoundError, ModuleNotFoundError) as exc:
        return None, str(exc)
    return engine.prompt_lengths, ""


# -- what is said -----------------------------------------------------------------------------------


def _print_reports(files: Mapping[str, PromptFile], reports: Mapping[str, FileReport]) -> None:
    columns = list(reports.values())
    rows: list[list[str]] = [["file", *(str(file.path) for file in files.values())]]

    def add(name: str, said: Callable[[FileReport], Any]) -> None:
        rows.append([name, *(str(said(report)) for report in columns)])

    add("rows", lambda report: report.rows)
    add("bad rows", lambda report: len(report.bad))
    add("with a target", lambda report: report.targets)
    add("repeated", lambda report: len(report.repeats))
    add("characters", lambda report: _spread(report.characters))
    if any(report.tokens is not None for report in columns):
        add("tokens", lambda report: _spread(report.tokens))
        add("tokens read", lambda report: report.limit)
        add("cut", lambda report: len(report.cut))
    if any(report.images for report in columns):
        add("images", lambda report: report.images)
    print_table(["", *reports], rows)


def _spread(found: Spread | None) -> str:
    return "-" if found is None else f"{found.least} to {found.most}, median {found.median}"


def _tell(
    reports: Mapping[str, FileReport], shared: Sequence[str], *, strict: bool, skips: bool
) -> int:
    bad = [line for report in reports.values() for line in report.bad]
    repeats = [line for report in reports.values() for line in report.repeats]
    cut = [line for report in reports.values() for line in report.cut]
    stretched = [line for report in reports.values() for line in report.stretched]
    kinds = [
        ("bad row", "bad rows", bad, not skips),
        ("held-out prompt is trained on", "held-out prompts are trained on", shared, True),
        ("prompt is a repeat", "prompts are repeats", repeats, False),
        ("prompt is cut", "prompts are cut", cut, False),
        ("image is stretched", "images are stretched", stretched, False),
    ]
    failed = False
    for one, many, lines, fails in kinds:
        if not lines:
            continue
        failed = failed or fails or strict
        level = "error" if fails or strict else "warning"
        print(f"{level}: {len(lines)} {one if len(lines) == 1 else many}")
        for line in lines[:SHOWN]:
            print(f"  {line}")
        if len(lines) > SHOWN:
            print(f"  ... and {len(lines) - SHOWN} more")
    print("the check failed" if failed else "the files can be trained on")
    return FAILED if failed else OK
