"""Sampling on two ranks whose every forward is a collective, against one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunRanks = Callable[..., list[str]]


def by_sample(outputs: list[dict[str, Any]], what: str, values: str) -> dict[Any, torch.Tensor]:
    """(group, k) -> what was sampled."""
    return {
        (found["group"], k): torch.tensor(value)
        for output in outputs
        for found in output[what]
        for k, value in zip(found["ks"], found[values], strict=True)
    }


@pytest.mark.timeout(240)
def test_case_27_two_ranks_sample_what_one_does(run_ranks: RunRanks, tiny_sd3: Path) -> None:
    two = [json.loads(output) for output in run_ranks("rollout", tiny_sd3, seconds=120.0)]
    one = [json.loads(output) for output in run_ranks("rollout", tiny_sd3, ranks=1, seconds=120.0)]
    for what, rows in (("found", 8), ("alone", 3)):
        for values in ("final", "log_probs"):
            expected, found = by_sample(one, what, values), by_sample(two, what, values)
            assert len(expected) == rows
            assert found.keys() == expected.keys()
            for sample, value in expected.items():
                torch.testing.assert_close(found[sample], value, rtol=0.0, atol=1e-4)
    # 5 rows and 3 rows in batches of 2: sizes 2, 2, 1 on both ranks, dummies where rows are short.
    places = [[place for found in output["found"] for place in found["places"]] for output in two]
    assert places == [
        [["0/0/0", 0, 2], ["0/0/0", 1, 2], ["0/0/1", 0, 2], ["0/0/1", 1, 2], ["0/0/2", 0, 1]],
        [["1/0/0", 0, 2], ["1/0/0", 1, 2], ["1/0/1", 0, 2]],
    ]
    assert all(output["exact"] for output in (*one, *two))  # replayed in those very batches
    assert two[1]["alone"] == []
    for output in two:
        assert output["disagreement"].startswith("ranks were about to make different calls:\n")
        assert "rank 1: sample" in output["disagreement"]
