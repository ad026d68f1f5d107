"""Held-out prompts, scored with a sampler and seeds of their own: the same noise at every step.

Each prompt counts once, whatever the number of ranks: a score is the mean of a prompt's samples, and
the result the mean over prompts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_core.config import converter
from omni_core.input_image import InputImage
from omni_core.options import OnRewardError
from omni_core.reward import RewardResult
from omni_core.trajectory import SamplingSpec
from omni_trainer.canary import check_echo
from omni_trainer.config import EvaluationConfig
from omni_trainer.data import PromptBatch, PromptRow
from omni_trainer.group import WorkerGroup
from omni_trainer.reporting.clips import Clip
from omni_trainer.reward_pool import RewardPool
from omni_trainer.rollout_plan import plan_rollout
from omni_trainer.run_directory import write_json
from omni_trainer.samples import Samples, detail_means, require_scores, sample_and_score
from omni_trainer.stopping import StopRequest

Pictures = NDArray[np.uint8]
"""[N, H, W, 3], RGB."""

PURPOSE = "validation"
PLAYED = 4
"""Samples whose videos are brought to the driver."""


@attrs.frozen(kw_only=True, eq=False)
class Shown:
    """What a person is shown of some samples."""

    pictures: Pictures
    """[N, H, W, 3]: of a video its middle frame."""
    clips: tuple[Clip, ...] = ()
    """Of the first samples, where they are videos."""
    edited: Pictures | None = None
    """[N, H, W, 3]: what each is an edit of, in its size."""

    @classmethod
    def concat(cls, parts: Sequence[Shown]) -> Shown:
        """Join; clips beyond the first few are let go."""
        return cls(
            pictures=np.concatenate([part.pictures for part in parts]),
            clips=tuple(clip for part in parts for clip in part.clips)[:PLAYED],
            edited=None
            if any(part.edited is None for part in parts)
            else np.concatenate([part.edited for part in parts if part.edited is not None]),
        )


@attrs.frozen(kw_only=True)
class PromptScores:
    """One held-out prompt."""

    row_id: str
    prompt: str
    target: str | None
    rewards: tuple[float, ...]
    """Of the samples that were scored."""
    unscored: int
    details: Mapping[str, float]
    """Means over the scored samples."""
    seeds: tuple[int, ...] = ()
    """Of all samples, in order: what draws them again."""

    @property
    def mean(self) -> float:
        """Mean reward; NaN without a scored sample."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan


@attrs.frozen(kw_only=True)
class Evaluation:
    """All held-out prompts at one step."""

    step: int
    prompts: tuple[PromptScores, ...]
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Means over the prompts that have a score, under their names in metrics.jsonl."""
        scored = [prompt for prompt in self.prompts if prompt.rewards]
        found: dict[str, float] = {}
        if scored:
            found["heldout/reward_mean"] = sum(p.mean for p in scored) / len(scored)
            for name in sorted({name for p in scored for name in p.details}):
                values = [p.details[name] for p in scored if name in p.details]
                found[f"heldout/{name}"] = sum(values) / len(values)
        found["heldout/prompts"] = float(len(scored))
        found["heldout/unscored"] = float(sum(prompt.unscored for prompt in self.prompts))
        return found

    @property
    def mean(self) -> float:
        """Mean reward over prompts; NaN if nothing was scored."""
        return self.metrics().get("heldout/reward_mean", math.nan)


class Evaluator:
    """Samples and scores the held-out prompts of a run."""

    def __init__(
        self,
        config: EvaluationConfig,
        rows: Sequence[PromptRow],
        *,
        sampling: SamplingSpec,
        seed: int,
        on_error: OnRewardError,
        group: WorkerGroup,
        pool: RewardPool,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.rows = tuple(rows[: config.max_prompts])
        self.sampling = sampling
        self.seed = seed
        self.on_error = on_error
        self.group = group
        self.pool = pool
        self.stop = stop or StopRequest()

    def run(self, step: int, *, weight_version: int | None) -> tuple[Evaluation, Shown | None]:
        """Evaluate the policy as it is.

        Returns:
            The scores, and the first samples of the first prompts.

        Raises:
            CanaryError: samples are not what was asked for.
            UnscoredError: a sample has no score, and the config says that it must.
            WorkerError: a worker failed.
            StopAskedError: the run is to stop.
        """
        started = time.perf_counter()
        self.group.broadcast("update_weights", self.config.policy)
        prompts: list[PromptScores] = []
        shown: list[Shown] = []
        for rows in self._waves():
            left = self.config.grid_prompts - sum(len(part.pictures) for part in shown)
            scores, part = self._wave(rows, weight_version, left)
            prompts += scores
            shown += [] if part is None else [part]
        seconds = time.perf_counter() - started
        found = Evaluation(step=step, prompts=tuple(prompts), seconds=seconds)
        return found, Shown.concat(shown) if shown else None

    def _wave(
        self, rows: tuple[PromptRow, ...], weight_version: int | None, pictures: int
    ) -> tuple[list[PromptScores], Shown | None]:
        """Evaluate some prompts; their samples are let go before the next ones."""
        samples = self._sample(rows, weight_version)
        keys = [(request.group_id, 0) for request in samples.plan.requests[:pictures]]
        places = [samples.places[key] for key in keys]
        shown = pick_shown(self.group, samples, places) if places else None
        return _scores(samples), shown

    def _waves(self) -> Iterator[tuple[PromptRow, ...]]:
        size = max(self.config.batch_size // self.config.samples_per_prompt, 1)
        for start in range(0, len(self.rows), size):
            yield self.rows[start : start + size]

    def _sample(self, rows: tuple[PromptRow, ...], weight_version: int | None) -> Samples:
        plan = plan_rollout(
            PromptBatch(rows=rows, epoch=0, occurrences=(0,) * len(rows)),
            purpose=PURPOSE,
            step=0,
            samples_per_prompt=self.config.samples_per_prompt,
            base_seed=self.seed,
            sampling=self.sampling,
            window=lambda seed: (),
            ranks=self.group.size,
            adapter=self.config.policy,
            weight_version=weight_version,
        )
        samples = sample_and_score(self.group, self.pool, plan, trained=False, stop=self.stop)
        check_echo(
            [source.info for source in samples.sources],
            asked=self.sampling,
            seeds=plan.seeds,
            adapter=self.config.policy,
            weight_version=weight_version,
        )
        if self.on_error is OnRewardError.RAISE:
            require_scores(samples)
        return samples


def pick_shown(group: WorkerGroup, samples: Samples, places: Sequence[tuple[int, int]]) -> Shown:
    """Bring single samples, (source, row) each, to the driver: pictures of all, videos of the first."""
    refs = [samples.sources[source].ref for source, _ in places]
    rows = [row for _, row in places]
    picked = group.call(0, "pick_images", rows, refs=refs)
    clips = ()
    if samples.sources[places[0][0]].info.effective.num_frames > 1:
        clips = tuple(group.call(0, "pick_clips", rows[:PLAYED], refs=refs[:PLAYED]))
    pictures = picked.numpy()
    images = {request.group_id: request.image for request in samples.plan.requests}
    groups = [samples.sources[source].info.records[row].group_id for source, row in places]
    edited = [image for group_id in groups if (image := images[group_id]) is not None]
    return Shown(
        pictures=pictures,
        clips=clips,
        edited=_sized(edited, pictures.shape[1:3]) if len(edited) == len(pictures) else None,
    )


def _sized(images: Sequence[InputImage], sides: tuple[int, ...]) -> Pictures:
    """Decode images at a height and width."""
    height, width = sides
    decoded = [Image.fromarray(image.pixels().numpy()) for image in images]
    return np.stack([np.asarray(each.resize((width, height))) for each in decoded])


def _scores(samples: Samples) -> list[PromptScores]:
    found = []
    for request, row in zip(samples.plan.requests, samples.plan.rows, strict=True):
        results = [
            samples.results[request.group_id, sample.k]
            for sample in request.samples
            if (request.group_id, sample.k) in samples.results
        ]
        seeds = tuple(sample.seed for sample in request.samples)
        found.append(_prompt_scores(row, results, seeds))
    return found


def _prompt_scores(
    row: PromptRow, results: Sequence[RewardResult], seeds: tuple[int, ...]
) -> PromptScores:
    scored = [result for result in results if result.ok]
    return PromptScores(
        row_id=row.row_id,
        prompt=row.prompt,
        target=row.target,
        rewards=tuple(result.value for result in scored),
        unscored=len(results) - len(scored),
        details=detail_means(scored),
        seeds=seeds,
    )


# -- files ------------------------------------------------------------------------------------------


def evaluation_path(directory: Path, step: int) -> Path:
    """Where the evaluation of *step* is."""
    return directory / f"step-{step:06d}.json"


def save_evaluation(directory: Path, found: Evaluation, pictures: Pictures | None) -> None:
    """Write the scores, and the pictures beside them."""
    path = evaluation_path(directory, found.step)
    write_json(path, attrs.asdict(found))
    if pictures is not None:
        np.save(path.with_suffix(".npy"), pictures, allow_pickle=False)


def load_evaluation(
    directory: Path, step: int, *, pictured: bool = True
) -> tuple[Evaluation, Pictures | None] | None:
    """Read what `save_evaluation` wrote; None if *step* was not evaluated.

    Args:
        directory: Of the evaluations.
        step: Trained steps.
        pictured: Read the pictures too, where there are some.
    """
    path = evaluation_path(directory, step)
    if not path.is_file():
        return None
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    prompts = tuple(converter.structure(prompt, PromptScores) for prompt in raw["prompts"])
    beside = path.with_suffix(".npy")
    pictures = np.load(beside, allow_pickle=False) if pictured and beside.is_file() else None
    return Evaluation(step=raw["step"], prompts=prompts, seconds=raw["seconds"]), pictures
