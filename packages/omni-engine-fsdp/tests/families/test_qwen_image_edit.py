"""What image to image has beside the other families: an image for each prompt, seen by encoder and transformer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.model import NO_GUIDANCE, Guidance
from omni_core.options import CheckpointConfig, DiffusionModelConfig, DiffusionPipelineConfig
from omni_core.testing.samples import requests_for
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
)
from omni_engine_fsdp.families.packing import pack
from omni_engine_fsdp.families.qwen_image_edit import QwenImageEditFamily

SIZE = DiffusionPipelineConfig(
    height=16, width=32, max_sequence_length=512, input_image_area=32 * 64
)
SPEC = SamplingSpec(
    sigmas=(1.0, 0.6, 0.3, 0.0),
    guidance_scale=4.0,
    height=16,
    width=32,
    max_sequence_length=512,
    kind=StepKind.SDE,
    noise_level=0.7,
)


def picture(seed: int, height: int = 32, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator).to(torch.uint8)


@pytest.fixture(scope="module")
def path(tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path("qwen_image_edit")


@pytest.fixture(scope="module")
def family(path: Path) -> QwenImageEditFamily:
    return QwenImageEditFamily(DiffusionModelConfig(path=str(path), pipeline=SIZE))


@pytest.fixture(scope="module")
def rollout(path: Path) -> EngineRollout:
    model = DiffusionModelConfig(path=str(path), pipeline=SIZE)
    engine = PPODiffusersFSDPEngine(model, FSDPEngineConfig(device="cpu"), None, CheckpointConfig())
    engine.initialize()
    return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)


def test_an_image_of_another_size_is_conditioned_on_as_in_the_stock_pipeline(
    family: QwenImageEditFamily, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image a call: of several, the stock pipeline resizes none for its encoder."""
    monkeypatch.setattr(
        pipeline_qwenimage_edit,
        "calculate_dimensions",
        lambda _, ratio: calculate_dimensions(SIZE.input_image_area, ratio),
    )
    stock = pipeline_qwenimage_edit.QwenImageEditPipeline.from_pretrained(
        path, processor=family.load_processor(), local_files_only=True
    )
    stock.set_progress_bar_config(disable=True)
    texts: list[Any] = []
    latents: list[Any] = []
    for method, found in (("encode_prompt", texts), ("prepare_latents", latents)):
        monkeypatch.setattr(stock, method, _recorded(getattr(stock, method), found))
    image = picture(1, height=40, width=80)
    stock(
        image=Image.fromarray(image.numpy()),
        prompt="make it red",
        negative_prompt="ugly",
        height=16,
        width=32,
        num_inference_steps=2,
        output_type="latent",
    )
    found = family.load_conditioner(torch.float32).encode_edits(
        ["make it red"],
        [image],
        family.load_codec(torch.float32),
        negative_prompt="ugly",
        guidance=Guidance(scale=4.0),
    )
    assert found.negative_prompt_embeds is not None
    assert torch.equal(found.prompt_embeds, texts[0][0])
    assert torch.equal(found.negative_prompt_embeds, texts[1][0])
    assert torch.equal(pack(found.image_latents), latents[0][1])
    assert found.image_latents.shape == (1, 4, 8, 16)


def _recorded(method: Any, found: list[Any]) -> Any:
    def recording(*args: Any, **keywords: Any) -> Any:
        found.append(method(*args, **keywords))
        return found[-1]

    return recording


def test_an_encoded_image_decodes_to_what_an_autoencoder_makes_of_it(
    family: QwenImageEditFamily,
) -> None:
    """Scaling is undone by decoding: the autoencoder's own round trip gives the same pixels."""
    codec = family.load_codec(torch.float32)
    images = torch.stack([picture(1), picture(2)])
    media = codec.decode({"image": codec.encode(images)})
    pixels = 2.0 * (images.permute(0, 3, 1, 2).float() / 255.0) - 1.0
    with torch.no_grad():
        latents = codec.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
        expected = codec.vae.decode(latents).sample[:, :, 0].clamp(-1, 1) / 2 + 0.5
    assert media.image is not None
    found = media.image.permute(0, 3, 1, 2).float() / 255.0
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1 / 255)


def test_samples_follow_their_own_image_and_are_replayed_bit_for_bit(
    rollout: EngineRollout,
) -> None:
    """One prompt with two images in one batch: each is encoded, kept and replayed."""
    requests = [
        attrs.evolve(request, image=InputImage.of(picture(seed)))
        for seed, request in enumerate(requests_for(SPEC, ["make it red"] * 2))
    ]
    # The same noise: what differs is the image.
    requests[1] = attrs.evolve(
        requests[1],
        samples=tuple(
            attrs.evolve(sample, seed=other.seed)
            for sample, other in zip(requests[1].samples, requests[0].samples, strict=True)
        ),
    )
    one, two = rollout.generate(requests)
    assert torch.equal(one.latents["image"][:, 0], two.latents["image"][:, 0])
    assert (one.latents["image"][:, -1] - two.latents["image"][:, -1]).abs().max() > 1e-3
    (again,) = rollout.generate([requests[0]], decode=False)
    torch.testing.assert_close(again.latents["image"], one.latents["image"], rtol=0.0, atol=1e-5)
    both = Trajectory.concat([one, two])
    assert both.conditioning.rows == 2
    assert torch.equal(rollout.engine.replay(both), both.log_probs)


def test_a_request_without_an_image_is_refused_by_name(rollout: EngineRollout) -> None:
    with pytest.raises(ValueError, match=r"group '0/0': this model edits images, and no input"):
        rollout.submit(requests_for(SPEC))
    with pytest.raises(ValueError, match="QwenImageEditConditioner edits images: each of the 1"):
        rollout.conditioner.encode(["a"], negative_prompt="", guidance=NO_GUIDANCE)


def test_a_rank_without_rows_edits_a_black_image(rollout: EngineRollout) -> None:
    black = InputImage.of(torch.zeros(16, 32, 3, dtype=torch.uint8))
    found = rollout.encode([""], images=[None], guidance=NO_GUIDANCE)
    expected = rollout.encode([""], images=[black], guidance=NO_GUIDANCE)
    for name in ("prompt_embeds", "image_latents"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_an_area_that_leaves_nothing_of_an_image_is_refused(path: Path) -> None:
    small = attrs.evolve(SIZE, input_image_area=16)
    family = QwenImageEditFamily(DiffusionModelConfig(path=str(path), pipeline=small))
    with pytest.raises(
        ValueError, match=r"input_image_area 16: an image of 32 to 16 would be 0 x 0"
    ):
        family.load_conditioner(torch.float32)


def test_a_transformer_of_the_plus_pipeline_is_refused(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "plus"
    shutil.copytree(path, copy)
    file = copy / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "zero_cond_t": True}))
    family = QwenImageEditFamily(DiffusionModelConfig(path=str(copy), pipeline=SIZE))
    with pytest.raises(ValueError, match="takes models without zero_cond_t"):
        family.load_denoiser(torch.float32)
