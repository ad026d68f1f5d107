"""The examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

from omni_core import resources

ROOT = Path(__file__).resolve().parents[1]


def test_a_loop_of_ones_own_trains(tmp_path):
    model = resources.resolve("package:omni_configs/tiny_signs")

    done = subprocess.run(
        [sys.executable, ROOT / "examples/own_loop.py", model, "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    assert done.returncode == 0, done.stderr
    ratios = re.findall(r"^step \d: brightness 0\.\d+, ratio (\S+)$", done.stdout, re.MULTILINE)
    assert ratios == ["1.0", "1.0"]
    assert (tmp_path / "own_loop_export/pytorch_lora_weights.safetensors").is_file()
