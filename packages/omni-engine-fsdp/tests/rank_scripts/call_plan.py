"""One rank of test_call_plan.py: tries plans that differ, and prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from omni_engine_fsdp.call_plan import (
    Call,
    CallPlan,
    CallPlanError,
    agree,
    common_count,
    common_counts,
    gather_text,
)

PLANS = {
    "equal": [(("transformer", 4, 3),)] * 2,
    "count": [(("transformer", 4, 3),), (("transformer", 4, 2),)],
    "shape": [(("transformer", 4, 3),), (("transformer", 2, 3),)],
    "expert": [(("high", 4, 1), ("low", 4, 1)), (("low", 4, 1), ("high", 4, 1))],
    "none": [(("transformer", 4, 3),), ()],
}


def ask(what: str, rank: int) -> dict[str, object]:
    """Try to agree on a plan of this rank."""
    calls = tuple(Call(expert, (rows, 8, 4, 4), n) for expert, rows, n in PLANS[what][rank])
    started = time.monotonic()
    error = None
    try:
        agree(CallPlan(phase="train", calls=calls), dist.group.WORLD)
    except CallPlanError as raised:
        error = str(raised)
    return {"error": error, "seconds": time.monotonic() - started}


def main() -> object:
    """Try every plan, then count."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found: dict[str, object] = {what: ask(what, rank) for what in PLANS}
    found["counts"] = [
        common_count(3 - rank, group),
        common_counts([rank, 5 - rank, 0], group),
        gather_text(["a", "später\n" * 100][rank], group),
    ]
    return found


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=30),
    )
    sys.stdout.write(json.dumps(main()))
    dist.destroy_process_group()
