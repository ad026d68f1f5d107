"""How the rows of a rank's requests are dealt into sampling batches that every rank makes alike.

Rows with one sampling spec and one adapter share batches, also across requests. Each rank makes as
many batches, of the same sizes, as the rank with the most rows; places that a rank has no row for are
dummies, copies of the batch's first row (or of a sample of its own if it has none).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.trajectory import RolloutRequest, SampleRecord, SamplingSpec
from omni_engine_fsdp import call_plan

Asked = tuple[str, InputImage | None]
"""A prompt, and the image that it edits."""


@attrs.frozen
class Likeness:
    """What rows of one batch have in common."""

    sampling: SamplingSpec
    adapter: str

    def to_text(self) -> str:
        """Write as JSON, which keeps every float as it is."""
        return json.dumps([attrs.asdict(self.sampling), self.adapter], sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> Likeness:
        """Read what `to_text` wrote."""
        sampling, adapter = json.loads(text)
        values = {
            **sampling,
            "sigmas": tuple(sampling["sigmas"]),
            "kind": StepKind.parse(sampling["kind"]),
        }
        return cls(SamplingSpec(**values), adapter)


@attrs.frozen
class Row:
    """One sample of a submitted request."""

    request: int
    """Place among the requests that were submitted together."""
    sample: SampleRecord
    window: tuple[int, ...]
    image: InputImage | None = None

    @property
    def asked(self) -> Asked:
        """What is encoded for it."""
        return self.sample.prompt, self.image


NOBODY = Row(-1, SampleRecord(group_id="", row_id="", k=0, seed=0, prompt=""), ())
"""What a rank without any row of its own denoises along with the others."""


@attrs.frozen
class Batch:
    """Rows that one rank denoises together."""

    likeness: Likeness
    rows: tuple[Row, ...]
    """This rank's own, at places 0, 1, ...; may be empty."""
    size: int
    """Rows with dummies: the same on every rank."""
    filler: Row = NOBODY
    """What the dummies copy where there is no row."""

    def padded(self) -> list[Row]:
        """Return `size` rows: the own ones, then copies of the first."""
        filler = self.rows[0] if self.rows else self.filler
        return [*self.rows, *[filler] * (self.size - len(self.rows))]


def deal(requests: Sequence[RolloutRequest], *, batch_size: int, group: Any | None) -> list[Batch]:
    """Deal all rows of *requests* into batches; with several ranks a collective.

    Args:
        requests: This rank's; may be empty where other ranks have some.
        batch_size: Rows of a full batch.
        group: Data-parallel group of the ranks, None for one.

    Returns:
        Batches in the order in which every rank runs them; rows in the order of the requests.
    """
    mine: dict[Likeness, list[Row]] = {}
    for place, request in enumerate(requests):
        rows = mine.setdefault(Likeness(request.sampling, request.adapter), [])
        rows.extend(Row(place, sample, request.window, request.image) for sample in request.samples)
    batches = []
    for likeness, most in _most_rows(mine, group).items():
        rows = mine.get(likeness, [])
        filler = rows[0] if rows else NOBODY
        for start in range(0, most, batch_size):
            size = min(batch_size, most - start)
            batches.append(Batch(likeness, tuple(rows[start : start + size]), size, filler))
    return batches


def _most_rows(rows: dict[Likeness, list[Row]], group: Any | None) -> dict[Likeness, int]:
    """Rows of the rank that has most, for everything that any rank samples, in one order."""
    counts = {likeness: len(each) for likeness, each in rows.items()}
    if call_plan.group_size(group) == 1:
        return counts
    said = json.dumps([[likeness.to_text(), count] for likeness, count in counts.items()])
    most: dict[Likeness, int] = {}
    for text in call_plan.gather_text(said, group, phase="sample"):
        for name, count in json.loads(text):
            likeness = Likeness.of_text(name)
            most[likeness] = max(most.get(likeness, 0), count)
    return most


def calls(experts: Iterable[str], rows: int, shape: Sequence[int]) -> list[call_plan.Call]:
    """Forwards of one batch: those in a row by one expert are one entry.

    Args:
        experts: The expert of every step, in order.
        rows: Rows of one forward, guidance branches included.
        shape: Of one row, for the plan's reader.
    """
    return [
        call_plan.Call(expert, (rows, *shape), len(list(run)))
        for expert, run in itertools.groupby(experts)
    ]
