"""The README's loop, its very text, trains under torchrun on two processes over gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.timeout(240)  # three processes import everything first, maybe on one core
def test_the_loop_of_the_readme_trains_without_ray(tiny_sd3: Path, tmp_path: Path) -> None:
    """Both ranks step by the same gradient, that of the rows of both."""
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "train.py", str(tiny_sd3)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Without a buffer two ranks' lines may come between each other's text and line end.
    found = re.findall(r"step (\d), rank (\d) of 2: gradient norm ([\d.e+-]+)", done.stdout)
    assert sorted((step, rank) for step, rank, _ in found) == [
        ("1", "0"),
        ("1", "1"),
        ("2", "0"),
        ("2", "1"),
    ]
    norms = {step: {norm for each, _, norm in found if each == step} for step, _, _ in found}
    assert all(len(each) == 1 for each in norms.values())
    tensors = load_file(tmp_path / "export/pytorch_lora_weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
