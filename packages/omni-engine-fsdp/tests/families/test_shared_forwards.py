"""Two ranks compute one forward together: the branches of guidance, or the positions of a sequence.

Velocity and gradients of every weight are those of a single rank, for every family that can; the others
are refused by name. Texts and pictures have odd lengths, and texts of masked families their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_core import plugins

SIZE = {"height": 16, "width": 32}
SIZES: dict[str, dict[str, Any]] = {
    "sd3": {**SIZE, "max_sequence_length": 16},
    "flux": {**SIZE, "max_sequence_length": 16},
    "flux2": {**SIZE, "max_sequence_length": 48},
    "qwen_image": {**SIZE, "max_sequence_length": 256},
    "qwen_image_edit": {**SIZE, "max_sequence_length": 512, "input_image_area": 2048},
    "z_image": {**SIZE, "max_sequence_length": 64},
    "sana": {"height": 32, "width": 64, "max_sequence_length": 32},
    "wan": {**SIZE, "max_sequence_length": 12, "num_frames": 3},
    "ltx2": {
        "height": 32,
        "width": 64,
        "max_sequence_length": 12,
        "num_frames": 5,
        "frame_rate": 25.0,
    },
}
ONE_BRANCH = {"flux"}
NO_PLAN = {"z_image", "sana", "ltx2"}
BOUND = {"wan": 1e-6}
"""Wan rounds to float32 inside its blocks, whatever it computes in."""


def test_every_family_of_the_package_is_tried() -> None:
    known = plugins.registry(plugins.MODELS)
    ours = {n for n in known.names() if known.get(n).target.startswith("omni_engine_fsdp.")}
    assert ours == set(SIZES)


@pytest.mark.parametrize(
    "families",
    [("sd3", "flux", "flux2", "qwen_image"), ("qwen_image_edit", "z_image", "sana", "wan", "ltx2")],
)
def test_what_two_ranks_compute_together_is_what_one_computes(
    families: tuple[str, ...], tiny_path: Callable[[str], Path], run_ranks: Any
) -> None:
    cases = [
        {"family": name, "path": str(tiny_path(name)), "size": SIZES[name]} for name in families
    ]
    for output in run_ranks("shared_forwards", json.dumps(cases), seconds=110):
        found = json.loads(output)
        assert len(found) == 4 * len(families)
        for name in families:
            check(
                name,
                {
                    key.partition(" ")[2]: said
                    for key, said in found.items()
                    if key.split()[0] == name
                },
            )


def check(name: str, found: dict[str, Any]) -> None:
    """What was found of one family."""
    for way, said in found.items():
        branches = "branch" in way
        if branches and name in ONE_BRANCH:
            assert "FluxDenoiser has one branch at any guidance scale; take 1" in said
        elif not branches and name in NO_PLAN:
            assert said == "no plan"
        else:
            assert said["velocity"] <= 1e-12, (name, way)
            assert said["gradient"] <= BOUND.get(name, 1e-12), (name, way)
