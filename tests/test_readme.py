"""The README's script, run as it stands on what a run left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_core import resources
from omni_trainer.config import load_run
from omni_trainer.run import run_training

ROOT = Path(__file__).resolve().parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of the smoke recipe, at a rate at which two steps show."""
    folder = tmp_path_factory.mktemp("readme") / "run"
    loaded = load_run("smoke", ["optimizer.lr=1e-2", "rollout.sampling.num_inference_steps=6"])
    run_training(loaded.config, run_dir=folder)
    return folder


def test_case_22_the_script_draws_the_trainers_own_pictures(run, tmp_path):
    (script,) = PYTHON.findall((ROOT / "README.md").read_text())
    path = tmp_path / "pictures.py"
    path.write_text(script)
    model = resources.resolve("package:omni_configs/tiny_signs")

    subprocess.run(
        [sys.executable, path, run / "export", model],
        check=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    before, after = (np.load(run / f"evaluations/step-{step:06d}.npy") for step in (0, 2))
    files = [run / f"export/picture-{number}.png" for number in range(len(after))]
    drawn = np.stack([np.asarray(Image.open(file)) for file in files])
    # Another batch size moves a value by one unit in the last place, hence a pixel by one level.
    assert difference(drawn, after) <= 1
    assert difference(drawn, before) > 20


@pytest.mark.timeout(300)  # some 30 s of one quiet core
def test_five_lines_train_a_reward_and_prompts_of_ones_own(tmp_path):
    """The README's shell, as it stands, in an empty folder."""
    (shell,) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(shell.splitlines()) == 5
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(
        ["sh", "-e", "-c", shell],
        check=False,
        cwd=tmp_path,
        timeout=280,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    assert done.returncode == 0, done.stderr
    assert "the files can be trained on" in done.stdout
    written = (tmp_path / "runs/red/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    redness = [line["reward/mean"] for line in lines[1:]]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(0.0 < value < 1.0 for value in redness)
    assert lines[-1]["heldout/reward_mean"] > lines[0]["heldout/reward_mean"]
    assert lines[-1]["reward/unscored"] == lines[-1]["rollout/cut_prompts"] == 0.0
    assert (tmp_path / "runs/red/grids/before_after.png").exists()
    (exported,) = (tmp_path / "runs/red/export").glob("*.safetensors")
    assert exported.stat().st_size > 0


def test_the_config_of_ones_own_run_is_valid(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    path = tmp_path / "my_run.yaml"
    path.write_text(text)

    config = load_run(str(path)).config

    assert config.rows_per_step == 48 * 24
    assert config.trainer.ranks == 8


def difference(first, second) -> int:
    return int(np.abs(first.astype(int) - second.astype(int)).max())
