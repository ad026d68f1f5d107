"""A CLIP model of preference as a reward, on a tiny one with random weights."""

from __future__ import annotations

import pytest
import torch

from omni_core.plugins import REWARDS, registry
from omni_core.reward import RewardInput
from omni_core.testing import RewardSuite
from omni_core.trajectory import Media
from omni_trainer.rewards.options import PickScoreRewardConfig
from omni_trainer.rewards.pickscore import PickScoreReward

transformers = pytest.importorskip("transformers", reason="the extra pickscore is not installed")

IMAGES = (torch.rand(3, 40, 48, 3, generator=torch.Generator().manual_seed(0)) * 255).to(
    torch.uint8
)
PROMPTS = [
    "a red sign",
    "bed",
    "a sign that is much longer than this tiny model can take in at all",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    pieces = ["<|startoftext|>", "<|endoftext|>"]
    pieces += [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    transformers.CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {"vocab_size": len(pieces), "max_position_embeddings": 24, "num_attention_heads": 2}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = {"image_size": 16, "patch_size": 8, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=size | text, vision_config=size | vision, projection_dim=8
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def reward(model):
    found = registry(REWARDS).get("pickscore").build(PickScoreRewardConfig(path=str(model)))
    found.setup()
    yield found
    found.close()


class TestPickScoreReward(RewardSuite):
    tolerance = 1e-6

    @pytest.fixture
    def reward(self, model):
        return registry(REWARDS).get("pickscore").build(PickScoreRewardConfig(path=str(model)))

    @pytest.fixture
    def media(self):
        return Media(image=IMAGES)

    @pytest.fixture
    def inputs(self):
        return [RewardInput(prompt=prompt) for prompt in PROMPTS]


def test_the_score_is_the_scaled_cosine_of_the_embeddings(reward, model):
    """From the towers and projections one by one; a batch of one and of three agree."""
    clip = transformers.CLIPModel.from_pretrained(model).eval()
    tokens = transformers.CLIPTokenizer.from_pretrained(model)
    pixels = transformers.CLIPImageProcessor.from_pretrained(model)
    expected = []
    for image, prompt in zip(IMAGES, PROMPTS, strict=True):
        ids = tokens([prompt], truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            text = clip.text_projection(clip.text_model(**ids).pooler_output)[0].double()
            given = pixels(images=[image.numpy()], return_tensors="pt")
            seen = clip.visual_projection(clip.vision_model(**given).pooler_output)[0].double()
        cosine = float(text @ seen / (text.norm() * seen.norm()))
        expected.append(float(clip.logit_scale.detach().double().exp()) * cosine / 26.0)
    inputs = [RewardInput(prompt=prompt) for prompt in PROMPTS]
    found = [result.value for result in reward.score(Media(image=IMAGES), inputs)]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in found}) == 3


def test_a_directory_without_a_model_is_named(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        PickScoreReward(PickScoreRewardConfig(path=str(tmp_path)))
    options = PickScoreRewardConfig(path=str(model), processor=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"holds no preprocessor_config\.json"):
        PickScoreReward(options)
