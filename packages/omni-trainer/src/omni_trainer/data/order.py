"""The order that prompts are dealt in: each epoch its own, and one that can be resumed."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

from omni_trainer.data.rows import PromptFileError, PromptRow


class Tail(enum.StrEnum):
    """What happens to the rows of an epoch that do not fill a batch."""

    CARRY = "carry"
    """The next epoch's first rows fill it up."""
    DROP = "drop"
    """They are left out of this epoch."""


@attrs.frozen(kw_only=True)
class PromptBatch:
    """The prompts of one step."""

    rows: tuple[PromptRow, ...]
    epoch: int
    """Of the first row, counted from 0; a carried tail is joined by rows of the next."""
    occurrences: tuple[int, ...]
    """For each row, how often it came before in this batch (a file smaller than a batch repeats)."""


class PromptSampler:
    """Deals batches of *batch_size* rows, each epoch in an order of its own.

    The order of epoch e depends on the seed and e alone, so the state is two numbers.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        batch_size: int,
        seed: int,
        tail: Tail,
        shuffle: bool = True,
    ) -> None:
        if not rows:
            msg = "there is no prompt to sample from"
            raise ValueError(msg)
        if tail is Tail.DROP and batch_size > len(rows):
            msg = (
                f"data.tail: a batch of {batch_size} prompts never fills from {len(rows)} rows with tail drop; "
                f"take at most {len(rows)}, or tail carry"
            )
            raise PromptFileError(msg)
        self._rows = tuple(rows)
        self._batch_size = batch_size
        self._seed = seed
        self._tail = tail
        self._shuffle = shuffle
        self._identity = _identity(rows, seed, shuffle)
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that start in the first epoch: ceil(rows / batch) carried, floor dropped."""
        whole, rest = divmod(len(self._rows), self._batch_size)
        return whole + (1 if rest and self._tail is Tail.CARRY else 0)

    def next(self) -> PromptBatch:
        """Deal the next batch."""
        if (
            self._tail is Tail.DROP and self._position + self._batch_size > len(self._rows)
        ) or self._position == len(self._rows):
            self._turn()
        epoch = self._epoch
        rows: list[PromptRow] = []
        while len(rows) < self._batch_size:
            if self._position == len(self._rows):
                self._turn()
            rows.append(self._rows[self._order[self._position]])
            self._position += 1
        seen: Counter[str] = Counter()
        occurrences = []
        for row in rows:
            occurrences.append(seen[row.row_id])
            seen[row.row_id] += 1
        return PromptBatch(rows=tuple(rows), epoch=epoch, occurrences=tuple(occurrences))

    def state(self) -> dict[str, Any]:
        """Plain data from which `load_state` goes on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where *state* was taken.

        Raises:
            ValueError: it was taken from other rows, or with another seed or order.
        """
        differs = [
            f"{key} {state.get(key)!r}, now {now!r}"
            for key, now in self._identity.items()
            if state.get(key) != now
        ]
        if differs:
            msg = f"the prompts are not those of the checkpoint: {'; '.join(differs)}"
            raise ValueError(msg)
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._permutation(self._epoch)

    def _turn(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        from omni_core.seeds import derive_seed  # torch, which a config has no use for

        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed("prompt-order", self._seed, epoch)).shuffle(order)
        return order


def _identity(rows: Sequence[PromptRow], seed: int, shuffle: bool) -> dict[str, Any]:
    """Say what an order belongs to."""
    from omni_core.seeds import derive_seed

    parts = [part for row in rows for part in (row.row_id, row.prompt, *_image_name(row))]
    digest = f"{derive_seed('prompts', *parts):016x}"
    return {"rows": len(rows), "digest": digest, "seed": seed, "shuffle": shuffle}


def _image_name(row: PromptRow) -> tuple[str, ...]:
    """Name a row's image by its file, wherever the folder is, or by its bytes; nothing of a row without one."""
    if row.image is None:
        return ()
    if row.image.data is not None:
        return (sha256(row.image.data).hexdigest(),)
    return (Path(str(row.image.path)).name,)
