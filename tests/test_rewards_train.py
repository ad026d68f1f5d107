"""Several rewards on the shipped pipeline: read signs, small files, and one that is only watched."""

from __future__ import annotations

import json

import pytest

from omni_trainer.config import load_run
from omni_trainer.run import run_training

PARTS = (
    "reward.name=weighted",
    "reward.terms={ocr: {name: ocr}, size: {name: jpeg_compressibility}}",
    "reward.weights.size=0.5",
    "reward.monitors.large={name: jpeg_compressibility, prefer: large}",
    "algorithm.reward_scale=group",
)


def test_ocr_and_jpeg_are_trained_together_and_a_monitor_is_watched(tmp_path):
    loaded = load_run("smoke", PARTS)
    run = run_training(loaded.config, run_dir=tmp_path / "run", resolved=loaded.resolved)

    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["reward/mean"] == pytest.approx(line["reward/ocr"] + 0.5 * line["reward/size"])
        assert -1.5 < line["reward/size"] < -0.7  # a sign of 32 x 32 px, in kB
        assert line["reward/large"] == pytest.approx(-line["reward/size"])
        assert 0.0 <= line["reward/ocr/exact"] <= 1.0
        assert line["reward/unscored"] == line["reward/large/unscored"] == 0.0
        assert line["advantage/group_std_mean"] > 0.0
    for name in ("ocr", "size", "large", "ocr/exact", "large/unscored"):
        assert f"heldout/{name}" in lines[0]
        assert f"heldout/{name}" in lines[2]
