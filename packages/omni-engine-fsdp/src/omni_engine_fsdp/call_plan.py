"""Every forward of a sharded module is a collective, so ranks agree on their calls before a phase.

Ranks that make different calls do not fail: they hang, or one's forward meets another's backward and
the numbers are wrong. So each rank states what it is about to call, a hash of that is gathered, and a
difference ends the phase on every rank with all plans in the message. A short rank fills up to the
common count with dummy rows of weight 0.

`group` is `BaseEngine.get_data_parallel_group()`: None means one rank, which costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist


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
    size = group_size(group)
    if size == 1:
        return
    said = plan.describe()
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([digest], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    if all(torch.equal(other, mine) for other in found):
        return
    plans = gather_text(said, group)
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(plans))
    raise CallPlanError(f"ranks were about to make different calls:\n{lines}")


def common_counts(counts: Sequence[int], group: Any | None) -> tuple[int, ...]:
    """The largest of each count over the ranks: what every rank fills up to. A collective.

    All ranks give equally many counts.
    """
    if group_size(group) == 1:
        return tuple(counts)
    largest = torch.tensor(list(counts), dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return tuple(largest.tolist())


def common_count(count: int, group: Any | None) -> int:
    """The largest count over the ranks. A collective."""
    return common_counts([count], group)[0]


def gather_text(text: str, group: Any | None) -> list[str]:
    """Every rank's text, by rank. A collective; texts may differ in length."""
    if group_size(group) == 1:
        return [text]
    data = text.encode()
    longest = common_count(len(data), group)
    sent = torch.zeros(longest + 8, dtype=torch.uint8)
    framed = len(data).to_bytes(8, "big") + data
    sent[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    found = [torch.empty_like(sent) for _ in range(group_size(group))]
    dist.all_gather(found, sent, group=group)
    texts = []
    for received in found:
        raw = bytes(received.tolist())
        texts.append(raw[8 : 8 + int.from_bytes(raw[:8], "big")].decode())
    return texts
