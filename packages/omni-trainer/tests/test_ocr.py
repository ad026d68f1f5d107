"""The OCR reward reads real pictures with the model that ships in RapidOCR's wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from omni_core import config, plugins
from omni_core.reward import RewardInput
from omni_core.trajectory import Media
from omni_trainer.rewards.ocr import OCRReward, is_blank, text_reward
from omni_trainer.rewards.options import OCRRewardConfig

COLOURS = [(250, 220, 60), (60, 110, 200), (235, 235, 235), (30, 130, 80)]


def sign(text: str, size: tuple[int, int] = (32, 32), font: int = 18, colour=COLOURS[0]):
    """A picture [H, W, 3] like those that the quickstart's pipeline was trained on."""
    image = Image.new("RGB", size, colour)
    ink = (20, 20, 20) if sum(colour) > 380 else (245, 245, 245)
    centre = (size[0] / 2, size[1] / 2)
    font = ImageFont.load_default(size=font)
    ImageDraw.Draw(image).text(centre, text, fill=ink, font=font, anchor="mm")
    return np.asarray(image)


def media(pictures) -> Media:
    return Media(image=torch.from_numpy(np.stack(pictures)))


@pytest.fixture(scope="module")
def reward():
    found = OCRReward(OCRRewardConfig())
    found.setup()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("read", "target", "value"),
    [
        ("Hello", "Hello", 1.0),
        ("HEL LO", "hello", 1.0),
        ("oh hello there", "Hello", 1.0),
        ("Hallo", "Hello", 0.8),
        ("He", "Hello", 0.4),
        ("", "Hello", 0.0),
        ("an altogether different text", "Hi", 0.0),
        ("4", "47", 0.5),
        ("New York", "new\nyork", 1.0),
    ],
)
def test_reward_of_a_text(read, target, value):
    assert text_reward(read, target) == pytest.approx(value, abs=1e-12)


def test_a_blank_target_has_no_score():
    with pytest.raises(ValueError, match="target ' ' is blank"):
        text_reward("Hi", " ")


@pytest.mark.parametrize(
    ("read", "target", "blank"),
    [
        ("", "47", True),
        ("回", "47", True),
        ("à", "47", True),
        ("O7", "47", False),
        ("83", "47", False),
        ("E", "Hello", False),
        ("É", "hello", False),
        ("三", "Hello", True),
        ("回", "日本", False),
    ],
)
def test_a_picture_is_blank_if_nothing_of_the_targets_kind_is_read(read, target, blank):
    assert is_blank(read, target) == blank


def test_the_model_ships_in_the_wheel():
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"
    assert {"PP-OCRv6_rec_small.onnx", "PP-OCRv6_det_small.onnx"} <= {
        p.name for p in models.iterdir()
    }


def test_small_signs_are_read_without_error(reward):
    texts = [f"{number:02d}" for number in range(3, 100, 7)]
    pictures = [sign(text, colour=COLOURS[i % 4]) for i, text in enumerate(texts)]
    blank = np.full((32, 32, 3), 200, np.uint8)
    inputs = [RewardInput(prompt="", target=text) for text in [*texts, "47"]]
    results = reward.score(media([*pictures, blank]), inputs)
    assert [result.details["read"] for result in results] == [*texts, ""]
    assert [result.value for result in results] == [1.0] * len(texts) + [0.0]
    assert [result.details["exact"] for result in results] == [1.0] * len(texts) + [0.0]
    assert [result.details["blank"] for result in results] == [0.0] * len(texts) + [1.0]


def test_a_wrong_digit_is_half_right(reward):
    result = reward.score(media([sign("41")]), [RewardInput(prompt="", target="47")])[0]
    assert (result.value, result.details) == (0.5, {"read": "41", "exact": 0.0, "blank": 0.0})


def test_a_target_inside_a_longer_text_scores_but_is_not_exact(reward):
    picture = sign("3147", size=(64, 32))
    result = reward.score(media([picture]), [RewardInput(prompt="", target="47")])[0]
    assert (result.value, result.details["exact"]) == (1.0, 0.0)


def test_the_batch_size_does_not_change_what_is_read(reward):
    pictures = media([sign(f"{n}0") for n in range(1, 6)]).image
    one = OCRReward(OCRRewardConfig(batch_size=1))
    one.setup()
    assert one.read(pictures) == reward.read(pictures) == ["10", "20", "30", "40", "50"]


def test_a_scene_is_read_by_finding_its_lines_first(reward):
    scene = sign("Spring Collection", size=(256, 256), font=22).copy()
    scene[180:220, 60:196] = sign("2024", size=(136, 40), font=22)
    found = OCRReward(OCRRewardConfig(detect=True))
    found.setup()
    inputs = [RewardInput(prompt="", target="Spring Collection 2024")]
    result = found.score(media([scene]), inputs)[0]
    assert (result.value, result.details["read"]) == (1.0, "Spring Collection 2024")
    assert reward.score(media([scene]), inputs)[0].value < 0.5
    blank = np.full((64, 64, 3), 90, np.uint8)
    assert found.read(media([blank]).image) == [""]


def test_targets_follow_the_configured_rule():
    prompt = 'a "Stop" sign above a "Go" sign'
    assert OCRReward(OCRRewardConfig(target_rule="first_quoted")).target(prompt) == "Stop"
    with pytest.raises(ValueError, match="2 quoted parts"):
        OCRReward(OCRRewardConfig()).target(prompt)
    with pytest.raises(
        config.ConfigError, match="target_rule: 'last' is none of quoted, first_quoted"
    ):
        config.structure({"target_rule": "last"}, OCRRewardConfig)


def test_a_row_without_a_target_is_a_failure_and_not_a_zero(reward):
    results = reward.score(media([sign("12")]), [RewardInput(prompt="p")])
    assert (results[0].ok, results[0].error) == (False, "the row has no target text")


def test_mistakes_are_named(reward):
    with pytest.raises(ValueError, match="the media hold none"):
        reward.score(Media(audio=torch.zeros(1, 1, 8), audio_rate=8), [RewardInput(prompt="")])
    with pytest.raises(ValueError, match="2 images for 1 inputs"):
        reward.score(media([sign("12"), sign("13")]), [RewardInput(prompt="", target="12")])
    with pytest.raises(RuntimeError, match="setup was not called"):
        OCRReward(OCRRewardConfig()).read(media([sign("12")]).image)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs rapidocr: pip install omni-trainer\[ocr\]"
    ):
        OCRReward(OCRRewardConfig()).setup()


def test_the_plugin_builds_it():
    plugin = plugins.registry(plugins.REWARDS).get("ocr")
    assert isinstance(plugin.build(plugin.options(batch_size=4)), OCRReward)
