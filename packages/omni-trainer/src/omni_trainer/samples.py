"""One step's samples as the driver knows them: who they are, how they scored, where they lie.

Scoring goes on while others are sampled; the driver sees metadata and scores, no tensor of a sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing

import attrs

from omni_core.reward import RewardInput, RewardResult
from omni_core.reward_parts import RESERVED
from omni_core.trajectory import TrajectoryInfo
from omni_trainer.data import PromptRow
from omni_trainer.group import Ref, Streamed, WorkerGroup
from omni_trainer.reward_pool import RewardPool
from omni_trainer.rollout_plan import RolloutPlan, SampleKey
from omni_trainer.stopping import StopRequest


@attrs.frozen(kw_only=True)
class SampleSource:
    """One trajectory that a rank has made."""

    rank: int
    info: TrajectoryInfo
    ref: Ref


@attrs.frozen(kw_only=True)
class Samples:
    """Everything that a plan asked for, sampled and scored."""

    plan: RolloutPlan
    sources: tuple[SampleSource, ...]
    """In the natural order, whatever order they were finished in."""
    places: Mapping[SampleKey, tuple[int, int]]
    """Sample -> (place in `sources`, row)."""
    results: Mapping[SampleKey, RewardResult]
    """Empty where nothing is scored."""
    sampling_seconds: float
    waiting_seconds: float
    """For scores, after the last sample was there."""

    @property
    def stochastic(self) -> bool:
        """Whether any step of them was drawn, and so has a log-prob."""
        return any(request.window for request in self.plan.requests)

    @property
    def decode_seconds(self) -> float | None:
        """Spent decoding, on the rank that spent most; None where no rank tells it apart."""
        spent: dict[int, float] = {}
        for source in self.sources:
            if source.info.decode_seconds is not None:
                spent[source.rank] = spent.get(source.rank, 0.0) + source.info.decode_seconds
        return max(spent.values(), default=None)

    def refs_of(self, rank: int) -> list[Ref]:
        """What *rank* sampled itself."""
        return [source.ref for source in self.sources if source.rank == rank]


def sample_and_score(
    group: WorkerGroup,
    pool: RewardPool,
    plan: RolloutPlan,
    *,
    trained: bool,
    stop: StopRequest,
) -> Samples:
    """Sample on all ranks, handing each trajectory to a scorer as soon as it is there.

    Args:
        group: Of the ranks.
        pool: Of the scorers.
        plan: Who samples what.
        trained: Whether the next update trains on it.
        stop: Looked at after each trajectory.

    Raises:
        StopAskedError: the run is to stop; what was sampled is let go.
        WorkerError: a rank or a scorer failed.
    """
    inputs = {
        request.group_id: reward_input(row)
        for request, row in zip(plan.requests, plan.rows, strict=True)
    }
    started = time.perf_counter()
    streamed: list[Streamed] = []
    asked = [(requests, trained) for requests in plan.by_rank]
    with closing(_generator(group.stream("generate", asked))) as stream:
        for item in stream:
            stop.look()
            records = item.info.records
            pool.submit(len(streamed), item.ref, [inputs[record.group_id] for record in records])
            streamed.append(item)
    sampled = time.perf_counter()
    scores = pool.collect_until(stop)
    scored = time.perf_counter()
    results = {
        (record.group_id, record.k): result
        for key, found in scores.items()
        for record, result in zip(streamed[key].info.records, found, strict=True)
    }
    return _ordered(plan, streamed, results, sampled - started, scored - sampled)


def _generator(stream: Iterator[Streamed]) -> Generator[Streamed]:
    yield from stream


def _ordered(
    plan: RolloutPlan,
    streamed: Sequence[Streamed],
    results: Mapping[SampleKey, RewardResult],
    sampling_seconds: float,
    waiting_seconds: float,
) -> Samples:
    natural = {key: place for place, key in enumerate(plan.keys)}

    def first(item: Streamed) -> int:
        record = item.info.records[0]
        return natural.get((record.group_id, record.k), len(natural))

    sources = tuple(
        SampleSource(rank=item.rank, info=item.info, ref=item.ref)
        for item in sorted(streamed, key=first)
    )
    return Samples(
        plan=plan,
        sources=sources,
        places={
            (record.group_id, record.k): (place, row)
            for place, source in enumerate(sources)
            for row, record in enumerate(source.info.records)
        },
        results=results,
        sampling_seconds=sampling_seconds,
        waiting_seconds=waiting_seconds,
    )


def reward_input(row: PromptRow) -> RewardInput:
    """Make what a scorer is told of a prompt's row."""
    return RewardInput(prompt=row.prompt, target=row.target, metadata=row.metadata, image=row.image)


def detail_means(results: Sequence[RewardResult]) -> dict[str, float]:
    """Average the numbers that a reward gave beside its scores; texts, and what is not finite, are left out.

    Raises:
        ValueError: one has a name that another metric has.
    """
    found: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.details.items():
            if not isinstance(value, str) and math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    taken = sorted(found.keys() & set(RESERVED))
    if taken:
        msg = (
            f"a reward gives a number called {taken[0]!r} beside its score, which is the name of a "
            f"metric (as are {', '.join(RESERVED)})"
        )
        raise ValueError(msg)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


class UnscoredError(RuntimeError):
    """Samples could not be scored, and `reward.on_error` is `raise`."""


def require_scores(samples: Samples) -> None:
    """Check that every sample has a score.

    Raises:
        UnscoredError: says how many have none, and the first one's error.
    """
    failed = [(key, result) for key, result in samples.results.items() if not result.ok]
    if failed:
        (group, k), result = failed[0]
        msg = (
            f"{len(failed)} of {len(samples.results)} samples have no score; sample {k} of group "
            f"{group!r}: {result.error} (reward.on_error: drop_group or mask goes on without them)"
        )
        raise UnscoredError(msg)
