"""A signal to a run of several processes: none of them dies of it before the run is saved."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_trainer.checkpoints import Checkpoints

pytestmark = pytest.mark.timeout(240)  # processes that import torch first, maybe on one core

SCRIPT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts us without it
from omni_core.testing.toys import register_toys
from omni_trainer.cli import main
register_toys()
sys.exit(main(sys.argv[1:]))
"""
LONG = ("trainer.steps=100000", "checkpoint.every=100000", "evaluation.every=0", "trainer.name=toy")


@pytest.fixture
def stopped(tmp_path, write_toy_run):
    """Start a command, send a signal once two steps are trained; returns code, stdout and stderr."""
    source = write_toy_run(tmp_path)
    (tmp_path / "omni_toys.py").write_text(SCRIPT)

    def run(send, *arguments, launcher=()):
        command = [sys.executable, *launcher, "omni_toys.py", "train", source, *LONG, *arguments]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        metrics = tmp_path / "runs/toy/metrics.jsonl"
        for _ in range(1800):
            if process.poll() is not None or (metrics.exists() and len(_lines(metrics)) > 2):
                break
            time.sleep(0.1)
        send(process)
        said, told = process.communicate(timeout=120)
        return process.returncode, said, told

    return run


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def saved(folder, told):
    """The step of the one checkpoint, which metrics.jsonl ends with."""
    (found,) = Checkpoints(folder / "runs/toy/checkpoints", keep=9).complete()
    steps = [json.loads(line)["step"] for line in _lines(folder / "runs/toy/metrics.jsonl")]
    assert steps == list(range(found.step + 1)), told
    state = found.state()
    assert state["step"] == found.step
    assert len(state["workers"]) == 2
    return found.step


def test_ctrl_c_at_a_terminal_reaches_the_driver_of_ray_alone(stopped, tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the extra ray is not installed")

    def ctrl_c(process):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the job

    code, said, told = stopped(ctrl_c, "trainer.backend=ray", "trainer.ranks=2")
    assert code == 130, told
    step = saved(tmp_path, told)
    assert f"saved after {step} steps: " in said
    assert told.splitlines()[-1].startswith("interrupted; the run is in runs/toy; ")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "who", ["torchrun", pytest.param("a rank that follows", marks=pytest.mark.slow)]
)
def test_launched_ranks_stop_together(who, stopped, tmp_path):
    def send(process):
        if who == "torchrun":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(follower(process.pid), signal.SIGTERM)

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, said, told = stopped(send, launcher=launcher)
    assert code != 0
    step = saved(tmp_path, told)
    assert f"saved after {step} steps: " in said
    assert "terminated; the run is in runs/toy; " in told
    assert "WorkerError" not in told
    assert "RuntimeError" not in told


def follower(launcher: int) -> int:
    """Process of rank 1."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"\0RANK=1\0" in (path / "environ").read_bytes():
                return int(path.name)
        except (OSError, ValueError):
            continue
    raise AssertionError("rank 1 is not there")
