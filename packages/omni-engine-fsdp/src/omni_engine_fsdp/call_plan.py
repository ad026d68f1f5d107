"""Every forward of a sharded module is a collective, so ranks agree on their calls before a phase.

Ranks that make different calls do not fail: they hang, or one's forward meets another's backward and
the numbers are wrong. So each rank states what it is about to call, a hash of that is gathered, and a
difference ends the phase on every rank with all plans in the message. A short rank fills up to the
common count with dummy rows of weight 0.

`group` holds all ranks of the engine (`RankMesh.group`): None means one, which costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor


class CallPlanError(RuntimeError):
    """Ranks were about to make different calls; the message shows every rank's plan."""


@attrs.frozen
class Call:
    """The same forward, made *count* times in a row."""

    expert: str
    """Name of the module in `Denoiser.experts`."""
    shape: tuple[int, ...]
    """What is the same on every rank after padding: rows, then whatever decides the cost."""
    count: int


@attrs.frozen(kw_only=True)
class CallPlan:
    """All calls of one phase, in order."""

    phase: str
    """`sample`, `train`, `replay`, ..."""
    calls: tuple[Call, ...]

    def describe(self) -> str:
        """One line, the same for equal plans alone."""
        calls = ", ".join(f"{c.count} x {c.expert} {list(c.shape)}" for c in self.calls)
        return f"{self.phase}: {calls or 'no call'}"


def group_size(group: Any | None) -> int:
    """Ranks of *group*; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def agree(plan: CallPlan, group: Any | None) -> None:
    """Check that every rank is about to make the same calls. A collective.

    Raises:
        CallPlanError: they differ, on every rank, with every rank's plan.
    """
    _exchange(plan.describe(), b"", group)


def agree_on_rows(rows: Iterable[object], group: Any | None, *, phase: str) -> None:
    """Check that the ranks of *group*, which compute one forward together, hold the same rows. A collective.

    Args:
        rows: What tells them apart; equal things are written alike.
        group: `RankMesh.together`.
        phase: For the message.

    Raises:
        CallPlanError: they do not.
    """
    if group_size(group) == 1:
        return
    said = [str(row) for row in rows]
    digest = hashlib.blake2b("\n".join(said).encode(), digest_size=7).hexdigest()
    first = f", the first {said[0]}" if said else ""
    _exchange(f"{phase}: {len(said)} rows of digest {digest}{first}", b"", group)


def common_counts(
    counts: Sequence[int], group: Any | None, *, phase: str = "counts"
) -> tuple[int, ...]:
    """The largest of each count over the ranks: what every rank fills up to. A collective.

    Args:
        counts: Equally many on every rank.
        group: See above.
        phase: What is counted for.

    Raises:
        CallPlanError: ranks are in different phases.
    """
    if group_size(group) == 1:
        return tuple(counts)
    tag = f"{phase}: agreeing on {len(counts)} counts"
    found = _exchange(tag, json.dumps(list(counts)).encode(), group)
    return tuple(max(each) for each in zip(*map(json.loads, found), strict=True))


def common_count(count: int, group: Any | None, *, phase: str = "counts") -> int:
    """The largest count over the ranks. A collective; see `common_counts`."""
    return common_counts([count], group, phase=phase)[0]


def gather_text(text: str, group: Any | None, *, phase: str = "text") -> list[str]:
    """Every rank's text, by rank. A collective; texts may differ in length.

    Raises:
        CallPlanError: ranks are in different phases.
    """
    found = _exchange(f"{phase}: exchanging texts", text.encode(), group)
    return [received.decode() for received in found]


def _exchange(tag: str, data: bytes, group: Any | None) -> list[bytes]:
    """Every rank's data, if all of them give the same tag.

    Whatever ranks agree on begins with one gather of the same size: ranks in different phases meet
    there and fail, instead of waiting in collectives that do not fit.
    """
    size = group_size(group)
    if size == 1:
        return [data]
    digest = hashlib.blake2b(tag.encode(), digest_size=7).digest()
    said = tag.encode()
    header = [int.from_bytes(digest, "big"), len(said), len(data)]
    found = _gather(torch.tensor(header, dtype=torch.int64), group)
    digests, tag_lengths, lengths = torch.stack(found).T.tolist()
    if len(set(digests)) > 1:
        tags = _gather_bytes(said, tag_lengths, group)
        lines = "\n".join(f"  rank {rank}: {each.decode()}" for rank, each in enumerate(tags))
        raise CallPlanError(f"ranks were about to make different calls:\n{lines}")
    return _gather_bytes(data, lengths, group) if any(lengths) else [b""] * size


def _gather_bytes(data: bytes, lengths: Sequence[int], group: Any) -> list[bytes]:
    padded = data.ljust(max(lengths), b"\0")
    found = _gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8), group)
    return [bytes(each.tolist())[:length] for each, length in zip(found, lengths, strict=True)]


def _gather(mine: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(group_size(group))]
    dist.all_gather(found, mine, group=group)
    return found
