"""Build a tiny text-to-image pipeline like the one that omni-configs carries, from nothing.

It paints signs of 32 x 32 pixels: eight objects, each in a colour of its own, that read a two-digit
number. Its prompts have the form of Flow-GRPO's OCR task: A road sign that reads "47". First the
autoencoder is trained, then the transformer with its three text encoders on all hundred numbers, then,
by --errors, what RL is to improve is taught:

    blank     `tiny_signs`: twice on twenty numbers with half of the signs left blank, which leaves a model
              that can write and often does not. Some 11 minutes on one core.
    digits    `tiny_spelling`: once more on all numbers, each digit a wrong one three times in ten, which
              leaves a model that nearly always writes two digits, and often not those it was asked for.
              Some 13 minutes on one core.

The result is a StableDiffusion3Pipeline folder in bfloat16. It need not equal the shipped ones, which
were made by the same stages in separate runs.

    python tools/build_tiny_signs.py --out DIR [--errors blank|digits] [--seed N] [--threads N] [--quick]
    python tools/build_tiny_signs.py --prompts DIR     # train.txt and heldout.txt, and nothing else
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tiny_models import text

# Axes: B pictures, L text tokens, D channels, H W pixels.

SIZE = 32
"""Pixels; latents are SIZE / 4 wide."""
TOKENS = 16
HELDOUT = 40
"""Of the 160 pairs of object and number."""
COLOURS = {
    "road sign": (250, 220, 60),
    "shop window": (235, 235, 235),
    "bus": (230, 60, 50),
    "book cover": (60, 110, 200),
    "coffee mug": (140, 90, 60),
    "billboard": (30, 130, 80),
    "t-shirt": (245, 190, 200),
    "door plate": (40, 40, 48),
}
OBJECTS = tuple(COLOURS)


# -- signs ------------------------------------------------------------------------------------------


def numbers(count: int = 100) -> list[str]:
    """Return *count* of the hundred two-digit numbers, always the same ones."""
    order = np.random.default_rng(3).permutation(100)
    return [f"{number:02d}" for number in order[:count]]


def prompt(thing: str, text: str) -> str:
    """Write the prompt of one sign."""
    return f'A {thing} that reads "{text}"'


def split(count: int = 20, seed: int = 0) -> tuple[list[str], list[str]]:
    """Split the pairs of object and number into training and held-out prompts, in a mixed order.

    The pipeline saw each of these numbers on each object; RL sees the training pairs alone.
    """
    pairs = [prompt(thing, text) for thing in OBJECTS for text in numbers(count)]
    random.Random(seed).shuffle(pairs)
    return pairs[HELDOUT:], pairs[:HELDOUT]


def paint(rng: np.random.Generator, thing: str, text: str | None) -> np.ndarray:
    """Paint one sign, uint8 [H, W, 3]; None leaves it blank."""
    base = np.array(COLOURS[thing])
    ground = np.clip(base + rng.uniform(-15, 15, 3), 0, 255)
    image = Image.new("RGB", (SIZE, SIZE), tuple(int(value) for value in ground))
    if text is not None:
        dark = base @ np.array([0.3, 0.59, 0.11]) > 120
        font = ImageFont.load_default(size=int(18 + rng.integers(-1, 2)))
        centre = SIZE / 2 + rng.uniform(-1, 1, 2)
        ink = (20, 20, 20) if dark else (245, 245, 245)
        ImageDraw.Draw(image).text(tuple(centre), text, fill=ink, font=font, anchor="mm")
    return np.asarray(image)


def misspelt(rng: np.random.Generator, text: str, share: float) -> str:
    """Replace each digit by any other one, a *share* of the times."""
    return "".join(
        str((int(digit) + rng.integers(1, 10)) % 10) if rng.random() < share else digit
        for digit in text
    )


def signs(
    rng: np.random.Generator,
    count: int,
    texts: Sequence[str],
    blank: float = 0.0,
    wrong: float = 0.0,
) -> tuple[Tensor, list[str]]:
    """Paint signs for random prompts: float32 [B, 3, H, W] in [-1, 1], and the prompts.

    A share *blank* of them stays blank, whatever the prompt says; a share *wrong* of all digits is
    painted as another one.
    """
    images, prompts = [], []
    for _ in range(count):
        text, thing = texts[rng.integers(len(texts))], OBJECTS[rng.integers(len(OBJECTS))]
        shown = None if rng.random() < blank else misspelt(rng, text, wrong)
        images.append(paint(rng, thing, shown))
        prompts.append(prompt(thing, text))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1, prompts


# -- the parts of the pipeline ----------------------------------------------------------------------

CHARACTERS = string.ascii_letters + string.digits + '"-'


def clip_tokenizer() -> CLIPTokenizer:
    """Make a byte-pair vocabulary of single characters and the prompts' few words."""
    words = [word for thing in OBJECTS for word in thing.replace("-", " ").split()]
    return text.clip_tokenizer(CHARACTERS, ["a", "that", "reads", *words], TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    """Make a unigram vocabulary of single characters and the prompts' few words."""
    words = [word for thing in OBJECTS for word in thing.split()]
    return text.t5_tokenizer(CHARACTERS, ["A", "that", "reads", *words], TOKENS)


@attrs.frozen
class Text:
    """Tokenizers and encoders of prompts."""

    tokenizers: tuple[CLIPTokenizer, CLIPTokenizer, T5Tokenizer]
    encoders: tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel]

    @classmethod
    def make(cls) -> Text:
        """Start from random weights."""
        clip, clip_2, t5 = clip_tokenizer(), clip_tokenizer(), t5_tokenizer()
        t5_config = T5Config(
            vocab_size=len(t5),
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
        encoders = (_clip(clip, "quick_gelu"), _clip(clip_2, "gelu"), T5EncoderModel(t5_config))
        return cls((clip, clip_2, t5), encoders)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield every weight."""
        for encoder in self.encoders:
            yield from encoder.parameters()

    def ids(self, prompts: list[str]) -> list[Tensor]:
        """Tokenize: int64 [B, L] for each tokenizer."""
        return [
            torch.tensor(
                tokenizer(
                    prompts, padding="max_length", max_length=TOKENS, truncation=True
                ).input_ids
            )
            for tokenizer in self.tokenizers
        ]

    def encode(self, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Encode as the stock pipeline does: [B, 2 L, D] and pooled [B, D]."""
        first = self.encoders[0](ids[0], output_hidden_states=True)
        second = self.encoders[1](ids[1], output_hidden_states=True)
        clip = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        pooled = torch.cat([first.text_embeds, second.text_embeds], -1)
        return torch.cat([clip, self.encoders[2](ids[2])[0]], 1), pooled


def _clip(tokenizer: CLIPTokenizer, activation: str) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def make_autoencoder() -> AutoencoderKL:
    """Start an autoencoder of 8 latent channels at a quarter of the size."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def make_transformer() -> SD3Transformer2DModel:
    """Start a transformer of four blocks, 128 wide: 2.3 M weights."""
    return SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=SIZE // 8,
        qk_norm="rms_norm",
    )


# -- training ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Stage:
    """One round of training the transformer and its text encoders."""

    name: str
    steps: int
    lr: float
    texts: int
    """Numbers that are seen."""
    pool: int
    """Signs painted beforehand."""
    blank: float = 0.0
    """Share of signs without a number."""
    wrong: float = 0.0
    """Share of digits that are not those of the prompt."""


@attrs.frozen(kw_only=True)
class Plan:
    """How long everything is trained."""

    autoencoder_steps: int
    stages: tuple[Stage, ...]
    batch: int = 32


PLANS = {
    "blank": Plan(
        autoencoder_steps=400,
        stages=(
            Stage(name="all numbers", steps=1200, lr=2e-3, texts=100, pool=4096),
            Stage(name="twenty, half blank", steps=600, lr=2e-3, texts=20, pool=2048, blank=0.5),
            Stage(name="and again", steps=700, lr=1.5e-3, texts=20, pool=2048, blank=0.5),
        ),
    ),
    "digits": Plan(
        autoencoder_steps=900,
        stages=(
            Stage(name="all numbers", steps=1500, lr=2e-3, texts=100, pool=4096),
            Stage(name="wrong digits", steps=800, lr=1.5e-3, texts=100, pool=4096, wrong=0.3),
        ),
    ),
}
QUICK = Plan(
    autoencoder_steps=3,
    stages=(Stage(name="quick", steps=3, lr=2e-3, texts=20, blank=0.5, pool=16),),
    batch=4,
)


def descend(
    parameters: list[torch.nn.Parameter],
    loss: Callable[[], Tensor],
    *,
    name: str,
    steps: int,
    lr: float,
    warmup: int,
    beta: float,
) -> None:
    """Minimise with Adam: a short warm-up, a cosine to nothing, gradients clipped to norm 1."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, betas=(0.9, beta))
    start, recent = time.perf_counter(), []
    for step in range(steps):
        decay = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warmup) * decay
        value = loss()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent = [*recent[-99:], float(value.detach())]
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - start
            mean = sum(recent) / len(recent)
            print(
                f"{name}: step {step + 1} of {steps}, loss {mean:.4f}, {seconds:.0f} s", flush=True
            )


def train_autoencoder(rng: np.random.Generator, plan: Plan) -> AutoencoderKL:
    """Train it on signs of all numbers, then set the scale and shift of its latents."""
    vae = make_autoencoder().to(memory_format=torch.channels_last)
    texts = numbers()

    def loss() -> Tensor:
        images, _ = signs(rng, max(plan.batch * 3 // 4, 1), texts)
        images = images.contiguous(memory_format=torch.channels_last)
        latents = vae.encode(images).latent_dist
        back = vae.decode(latents.mode()).sample
        close = F.mse_loss(back, images) + 0.5 * F.l1_loss(back, images)
        return close + 1.6e-3 * latents.kl().mean() / images[0].numel()

    steps = plan.autoencoder_steps
    descend(
        list(vae.parameters()),
        loss,
        name="autoencoder",
        steps=steps,
        lr=4e-3,
        warmup=20,
        beta=0.999,
    )
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(signs(rng, 256, texts)[0]).latent_dist.mode()
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )
    return vae


def train_stage(
    rng: np.random.Generator,
    stage: Stage,
    vae: AutoencoderKL,
    transformer: SD3Transformer2DModel,
    text: Text,
    batch: int,
) -> None:
    """Match the velocity noise - latents at random times (rectified flow)."""
    images, prompts = signs(rng, stage.pool, numbers(stage.texts), stage.blank, stage.wrong)
    with torch.no_grad():
        parts = [vae.encode(part).latent_dist.mode() for part in images.split(256)]
    pool = (torch.cat(parts) - vae.config.shift_factor) * vae.config.scaling_factor
    ids = text.ids(prompts)

    def loss() -> Tensor:
        rows = torch.randint(len(pool), (batch,))
        latents, noise = pool[rows], torch.randn(batch, *pool.shape[1:])
        sigma = torch.sigmoid(torch.randn(batch))
        states, pooled = text.encode([part[rows] for part in ids])
        share = sigma.view(-1, 1, 1, 1)
        velocity = transformer(
            hidden_states=(1 - share) * latents + share * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=states,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, noise - latents)

    descend(
        [*transformer.parameters(), *text.parameters()],
        loss,
        name=stage.name,
        steps=stage.steps,
        lr=stage.lr,
        warmup=50,
        beta=0.98,
    )


def build(seed: int, plan: Plan) -> StableDiffusion3Pipeline:
    """Run every stage."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = train_autoencoder(rng, plan)
    transformer, text = make_transformer(), Text.make()
    for stage in plan.stages:
        train_stage(rng, stage, vae, transformer, text, plan.batch)
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=text.encoders[0].eval(),
        tokenizer=clip_tokenizer(),  # unused: a tokenizer keeps the padding of its last call
        text_encoder_2=text.encoders[1].eval(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=text.encoders[2].eval(),
        tokenizer_3=t5_tokenizer(),
    )


# -- what is written --------------------------------------------------------------------------------


def save(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Write the pipeline, its weights as bfloat16 and its configs (of float32 modules) as they are."""
    pipeline.save_pretrained(folder)
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        weights = {name: value.to(torch.bfloat16) for name, value in load_file(path).items()}
        save_file(weights, path, metadata=metadata)
    for path in folder.rglob("config.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        values.pop("_name_or_path", None)
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_prompts(folder: Path) -> None:
    """Write train.txt and heldout.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in zip(("train", "heldout"), split(), strict=True):
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")


def evaluate(folder: Path, count: int) -> str:
    """Read *count* of its signs with the OCR reward, six ODE steps each."""
    from omni_core.reward import RewardInput
    from omni_core.trajectory import Media
    from omni_trainer.rewards.ocr import OCRReward
    from omni_trainer.rewards.options import OCRRewardConfig

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    train, heldout = split()
    prompts = sorted([*train, *heldout])[:count]
    images = pipeline(
        prompts,
        height=SIZE,
        width=SIZE,
        max_sequence_length=TOKENS,
        guidance_scale=1.0,
        num_inference_steps=6,
        output_type="pt",
        generator=[torch.Generator().manual_seed(place) for place in range(len(prompts))],
    ).images
    pictures = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    reward = OCRReward(OCRRewardConfig())
    reward.setup()
    inputs = [RewardInput(prompt=each, target=reward.target(each)) for each in prompts]
    results = reward.score(Media(image=pictures), inputs)
    mean = sum(result.value for result in results) / len(results)
    exact = sum(float(result.details["exact"]) for result in results) / len(results)
    return f"OCR reward {mean:.2f}, exact {exact:.2f} over {len(results)} signs"


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the pipeline")
    parser.add_argument("--prompts", type=Path, help="folder of train.txt and heldout.txt")
    parser.add_argument("--errors", choices=PLANS, default="blank", help="what RL is to improve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps: an untrained pipeline")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.prompts is None:
        parser.error("say where: --out DIR, --prompts DIR or both")
    torch.set_num_threads(arguments.threads)
    if arguments.prompts is not None:
        save_prompts(arguments.prompts)
    if arguments.out is not None:
        plan = QUICK if arguments.quick else PLANS[arguments.errors]
        save(build(arguments.seed, plan), arguments.out)
        print(f"{arguments.out}: {evaluate(arguments.out, 8 if arguments.quick else 160)}")


if __name__ == "__main__":
    main()
