"""The loop in processes that torchrun started: one launch, which launched_ranks.py fills with checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_trainer.config import load_run
from omni_trainer.config_rules import broken_rules

pytestmark = pytest.mark.timeout(240)  # three processes import torch first, maybe on one core


@pytest.fixture(scope="module")
def launched(tmp_path_factory, write_toy_run):
    """(Exit code, what was written to stderr, the folder of what was found)."""
    out = tmp_path_factory.mktemp("launched")
    source = write_toy_run(out)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("launched_ranks.py"))
    done = subprocess.run(
        [sys.executable, *command, script, str(out), source],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (out / "found.json").is_file(), done.stderr[-4000:]
    return done.returncode, done.stderr, out


def found(launched):
    return json.loads((launched[2] / "found.json").read_text())


def test_every_kind_of_call_reaches_its_ranks(launched):
    assert found(launched)["calls"] == {
        "broadcast": [["told", 0, 3], ["told", 1, 3]],
        "stream": [
            [0, "rank 0 makes 0"],
            [1, "rank 1 makes 0"],
            [1, "rank 1 makes 1"],
        ],
        # Objects go to where they are needed: rank 0 made 0, rank 1 made 10 and 11.
        "scatter": [["told", 0, 12], ["told", 1, 13]],
        "call": ["told", 1, 5],
        "get": 11,
        "let go": [1, 0],
    }


def lines(run):
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {n: v for n, v in line.items() if not n.startswith(("time/", "memory/"))} for line in read
    ]


def test_case_28_a_launched_run_resumes_bit_for_bit(launched):
    straight, resumed = launched[2] / "straight", launched[2] / "resumed"
    assert len(lines(straight)) == 5
    assert lines(resumed)[3:] == lines(straight)[3:]
    state = json.loads((straight / "checkpoints/step-000004/state.json").read_text())
    assert state["ranks"] == 2


def test_case_35_the_rank_that_failed_first_is_told_and_ends_all(launched):
    code, written, _ = launched
    told = found(launched)["failure"]
    assert told.splitlines()[0] == "actor rank 1: ValueError: x (in fail)"
    assert told.splitlines()[-1] == "ValueError: x"
    assert "error: actor rank 1: ValueError: x (in fail)" in written
    assert code != 0


def test_ranks_are_the_launched_processes(monkeypatch, toy_source):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = load_run(toy_source).config
    assert (config.trainer.ranks, config.trainer.backend.value) == (3, "local")
    monkeypatch.delenv("RANK")
    sections = {name: getattr(config, name) for name in ("algorithm", "rollout", "data", "trainer")}
    sections |= dict.fromkeys(("engine", "reward", "model", "optimizer", "evaluation"))
    told = dict(broken_rules(sections, {"reward": {}}))
    assert told["trainer.ranks"] == (
        "3 ranks need trainer.backend=ray; backend local has 1, and 3 if it is started by torchrun "
        "--nproc-per-node 3 -m omni_trainer train ..."
    )
