"""The shipped pipeline works in stock diffusers, and one like it can be made from nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omni_core import resources
from omni_core.reward import RewardInput
from omni_core.trajectory import Media
from omni_trainer.rewards.ocr import OCRReward
from omni_trainer.rewards.options import OCRRewardConfig

ROOT = Path(__file__).resolve().parents[1]
BUILDER = ROOT / "tools/build_tiny_signs.py"


def load(folder: Path):
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline, prompts):
    images = pipeline(
        prompts,
        height=32,
        width=32,
        max_sequence_length=16,
        guidance_scale=1.0,
        num_inference_steps=6,
        output_type="pt",
        generator=[torch.Generator().manual_seed(place) for place in range(len(prompts))],
    ).images
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers and transformers
@pytest.mark.parametrize(
    ("name", "blanks"),
    [("tiny_signs", (0.3, 0.7)), ("tiny_spelling", (0.0, 0.1))],
)
def test_a_shipped_pipeline_paints_signs_in_stock_diffusers(name, blanks):
    pipeline = load(resources.resolve(f"package:omni_configs/{name}"))
    path = resources.resolve("package:omni_configs/prompts/tiny_signs/heldout.txt")
    prompts = path.read_text(encoding="utf-8").splitlines()
    reward = OCRReward(OCRRewardConfig())
    reward.setup()
    inputs = [RewardInput(prompt=prompt, target=reward.target(prompt)) for prompt in prompts]
    results = reward.score(Media(image=paint(pipeline, prompts)), inputs)
    mean = sum(result.value for result in results) / len(results)
    blank = sum(result.details["blank"] for result in results) / len(results)
    # What RL starts from: one does not write half of the time, the other one writes wrong digits.
    assert 0.25 < mean < 0.6
    assert blanks[0] <= blank < blanks[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pipeline_of_the_same_layout_is_made_from_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, BUILDER, "--quick", "--out", tmp_path / "made", "--prompts", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "over 8 signs" in done.stdout
    shipped = resources.resolve("package:omni_configs/tiny_signs")

    def layout(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    assert layout(tmp_path / "made") == layout(shipped) - {"README.md"}
    made, known = load(tmp_path / "made"), load(shipped)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        shapes = [
            {key: tuple(value.shape) for key, value in getattr(each, name).state_dict().items()}
            for each in (made, known)
        ]
        assert shapes[0] == shapes[1]
    assert made.tokenizer.get_vocab() == known.tokenizer.get_vocab()
    assert made.tokenizer_3.get_vocab() == known.tokenizer_3.get_vocab()
    for name in ("train.txt", "heldout.txt"):
        known_prompts = resources.resolve(f"package:omni_configs/prompts/tiny_signs/{name}")
        assert (tmp_path / name).read_bytes() == known_prompts.read_bytes()
