"""What was submitted together: cut into batches, and put together again as trajectories.

Rows with one sampling spec and one adapter share batches, also across requests, in the order of the
requests: so the same requests are always denoised in the same batches, whatever else waits and however
many engines there are. Letters: B rows, T steps, W trained steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import attrs
import torch

from omni_core.rollout import RolloutStateError
from omni_core.trajectory import (
    BatchPlace,
    Media,
    RolloutRequest,
    SampleRecord,
    Trajectory,
)
from omni_rollout_vllm.messages import Row, SampleBatch, SampledBatch


@attrs.frozen(kw_only=True, eq=False)
class Work:
    """One batch of a job, for an engine."""

    job: Job
    batch: SampleBatch
    places: tuple[tuple[int, SampleRecord], ...]
    """(request, sample) of each row."""


@attrs.frozen(kw_only=True, eq=False)
class _Piece:
    """Rows of one request that one batch gave, in its order."""

    sampled: SampledBatch
    rows: tuple[int, ...]
    """Places in the batch."""
    samples: tuple[SampleRecord, ...]
    name: str
    size: int
    version: int


@attrs.define(eq=False)
class Job:
    """The requests of one `submit`."""

    requests: tuple[RolloutRequest, ...]
    decode: bool
    left: int = 0
    """Batches that were not sampled yet."""
    ready: deque[Trajectory] = attrs.field(factory=deque)
    failure: Exception | None = None
    cancelled: bool = False
    _pieces: dict[int, list[_Piece]] = attrs.field(factory=dict)

    def deal(self, *, batch_size: int, prefix: str, adapters: bool) -> list[Work]:
        """Cut all rows into batches.

        Args:
            batch_size: Rows of a full batch.
            prefix: Of the batches' names, which are `PREFIXn`.
            adapters: Whether engines hold adapters by name; without, they sample with their weights.
        """
        rows: dict[object, list[tuple[int, SampleRecord]]] = {}
        for place, request in enumerate(self.requests):
            found = rows.setdefault((request.sampling, request.adapter), [])
            found.extend((place, sample) for sample in request.samples)
        dealt: list[Work] = []
        for each in rows.values():
            for start in range(0, len(each), batch_size):
                places = each[start : start + batch_size]
                name = f"{prefix}{len(dealt)}"
                dealt.append(self._work(places, name, adapters))
        self.left = len(dealt)
        return dealt

    def _work(self, places: Sequence[tuple[int, SampleRecord]], name: str, adapters: bool) -> Work:
        request = self.requests[places[0][0]]
        rows = tuple(
            Row(prompt=sample.prompt, seed=sample.seed, window=self.requests[place].window)
            for place, sample in places
        )
        batch = SampleBatch(
            name=name,
            sampling=request.sampling,
            adapter=request.adapter if adapters else None,
            rows=rows,
            decode=self.decode,
        )
        return Work(job=self, batch=batch, places=tuple(places))

    def take(self, work: Work, sampled: SampledBatch, *, version: int) -> None:
        """Keep what a batch gave; requests that are complete become trajectories.

        Raises:
            RolloutStateError: what was used is not what was asked for, or the weights changed while a
                request was being sampled.
        """
        differs = work.batch.sampling.difference(sampled.effective)
        if differs is not None:
            msg = f"the engine did not sample as asked:\n{differs}"
            raise RolloutStateError(msg)
        self.left -= 1
        for request in dict.fromkeys(place for place, _ in work.places):
            rows = [i for i, (place, _) in enumerate(work.places) if place == request]
            piece = _Piece(
                sampled=sampled,
                rows=tuple(rows),
                samples=tuple(work.places[i][1] for i in rows),
                name=work.batch.name,
                size=len(work.places),
                version=version,
            )
            pieces = self._pieces.setdefault(request, [])
            pieces.append(piece)
            if sum(len(each.rows) for each in pieces) == len(self.requests[request].samples):
                self.ready.append(self._join(request, self._pieces.pop(request)))

    def _join(self, place: int, pieces: Sequence[_Piece]) -> Trajectory:
        request = self.requests[place]
        order = {sample.k: i for i, sample in enumerate(request.samples)}
        pieces = sorted(pieces, key=lambda piece: order[piece.samples[0].k])
        versions = {piece.version for piece in pieces}
        if len(versions) != 1:
            msg = f"group {request.group_id!r} was sampled with weight versions {sorted(versions)}"
            raise RolloutStateError(msg)
        steps = torch.tensor(request.window, dtype=torch.int64)
        count = len(request.samples)
        return Trajectory(
            latents={
                name: torch.cat([p.sampled.latents[name][list(p.rows)] for p in pieces])
                for name in pieces[0].sampled.latents
            },
            step_indices=steps.expand(count, -1).clone(),
            log_probs=torch.cat([p.sampled.log_probs[list(p.rows)] for p in pieces])[:, steps],
            conditioning=pieces[0].sampled.conditioning[request.prompt].owned(),
            prompt_index=torch.zeros(count, dtype=torch.int64),
            media=_media(pieces),
            records=request.samples,
            effective=pieces[0].sampled.effective,
            adapter=request.adapter,
            weight_version=pieces[0].version,
            places=tuple(_places(pieces)),
        )


def _media(pieces: Sequence[_Piece]) -> Media | None:
    parts = [
        p.sampled.media.select(torch.tensor(p.rows)) for p in pieces if p.sampled.media is not None
    ]
    return Media.concat(parts) if parts else None


def _places(pieces: Sequence[_Piece]) -> Iterator[BatchPlace]:
    for piece in pieces:
        for row in piece.rows:
            yield BatchPlace(piece.name, row, piece.size)
