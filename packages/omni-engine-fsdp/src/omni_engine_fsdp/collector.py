"""Rows come out of batches, trajectories belong to requests: this puts the ones together.

Everything it keeps and returns lies on the CPU, in tensors of its own. Letters: B rows, T steps, W
trained steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.trajectory import (
    BatchPlace,
    Conditioning,
    Media,
    RolloutRequest,
    SamplingSpec,
    Trajectory,
)
from omni_engine_fsdp.batches import Batch
from omni_engine_fsdp.sampling import SampledBatch


@attrs.frozen(kw_only=True, eq=False)
class _Piece:
    """Rows of one request that one batch gave."""

    latents: Mapping[str, Tensor]
    log_probs: Tensor
    """[n, T]."""
    media: Media | None
    places: tuple[BatchPlace, ...]


@attrs.frozen(kw_only=True)
class Facts:
    """What holds for all rows of a batch."""

    effective: SamplingSpec
    """What was really used."""
    weight_version: int
    name: str
    """Of the batch."""


@attrs.define(eq=False)
class Collector:
    """Joins the rows of requests that were submitted together."""

    requests: Sequence[RolloutRequest]
    conditioning_of: Callable[[RolloutRequest], Conditioning]
    """[1, ...] of a request's prompt, owned, on the CPU."""
    _pieces: dict[int, list[_Piece]] = attrs.field(factory=dict, init=False)

    def add(
        self, batch: Batch, sampled: SampledBatch, media: Media | None, facts: Facts
    ) -> list[Trajectory]:
        """Take what a batch gave.

        Args:
            batch: As it was dealt.
            sampled: Its rows, dummies included.
            media: Of its own rows alone; None where nothing was decoded.
            facts: What holds for all of them.

        Returns:
            The trajectories of the requests that are complete now, in their order.
        """
        touched = dict.fromkeys(row.request for row in batch.rows)
        latents = {name: value[: len(batch.rows)].cpu() for name, value in sampled.latents.items()}
        log_probs = sampled.log_probs[: len(batch.rows)].cpu()
        media = None if media is None else media.to("cpu")
        for request in touched:
            rows = [place for place, row in enumerate(batch.rows) if row.request == request]
            index = torch.tensor(rows)
            piece = _Piece(
                latents={name: value[index] for name, value in latents.items()},
                log_probs=log_probs[index],
                media=None if media is None else media.select(index),
                places=tuple(BatchPlace(facts.name, place, batch.size) for place in rows),
            )
            self._pieces.setdefault(request, []).append(piece)
        return [self._join(request, facts) for request in touched if self._complete(request)]

    def _complete(self, request: int) -> bool:
        found = sum(len(piece.places) for piece in self._pieces[request])
        return found == len(self.requests[request].samples)

    def _join(self, place: int, facts: Facts) -> Trajectory:
        request, pieces = self.requests[place], self._pieces.pop(place)
        rows, steps = len(request.samples), torch.tensor(request.window, dtype=torch.int64)
        media = [piece.media for piece in pieces if piece.media is not None]
        return Trajectory(
            latents={
                name: torch.cat([piece.latents[name] for piece in pieces])
                for name in pieces[0].latents
            },
            step_indices=steps.expand(rows, -1).clone(),
            log_probs=torch.cat([piece.log_probs for piece in pieces])[:, steps],
            conditioning=self.conditioning_of(request),
            prompt_index=torch.zeros(rows, dtype=torch.int64),
            media=Media.concat(media) if media else None,
            records=request.samples,
            effective=facts.effective,
            adapter=request.adapter,
            weight_version=facts.weight_version,
            places=tuple(where for piece in pieces for where in piece.places),
        )
