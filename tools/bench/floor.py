"""The floor of a training step: one FlowGRPO step in bare PyTorch, diffusers and PEFT loops.

Nothing of this project is imported. What it leaves out (FSDP, per-sample generators, records, checks,
metrics) is what the product is measured against; what it keeps is the same work: the same pictures,
denoising batches, decodes, OCR calls, packed (sample, step) micro-batches and optimizer.

Letters: B pictures of a step, T sampling steps, M rows of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from rapidfuzz.distance import Levenshtein
from rapidocr import RapidOCR
from rapidocr.ch_ppocr_rec import TextRecInput
from torch import Tensor

LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of one step, the same for the floor and the product."""

    model: Path
    prompts: Sequence[str]
    targets: Sequence[str]
    prompts_per_step: int = 8
    samples_per_prompt: int = 12
    num_inference_steps: int = 6
    noise_level: float = 0.7
    batch_size: int = 64
    """Pictures denoised together."""
    micro_batch_size: int = 64
    """(sample, step) rows of one training forward."""
    ocr_batch_size: int = 32
    height: int = 32
    width: int = 32
    max_sequence_length: int = 16
    rank: int = 16
    alpha: float = 32.0
    lora_targets: Sequence[str] = LORA_TARGETS
    lr: float = 2e-3
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    clip: float = 2e-3
    adv_clip: float = 5.0

    @property
    def rows(self) -> int:
        """B."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass
class Split:
    """Seconds of the parts of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Recognizer:
    """RapidOCR's recogniser; pictures in, texts out."""

    def __init__(self, batch_size: int) -> None:
        height = 48
        self.engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Rec.rec_img_shape": [3, height, height],
                "Rec.rec_batch_num": batch_size,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        self.read(np.full((1, height, height, 3), 255, np.uint8))  # a model loads with the first

    def read(self, images: np.ndarray[Any, Any]) -> list[str]:
        """uint8 [B, H, W, 3] RGB -> B texts."""
        pictures = [np.ascontiguousarray(image) for image in images[..., ::-1]]
        if self.engine.text_rec is None:
            self.engine(pictures[0], use_det=False)
        return list(self.engine.text_rec(TextRecInput(img=pictures)).txts)


def text_reward(read: str, target: str) -> float:
    """1 - edit distance / length, the distance capped; 1 if the target is part of what was read."""
    read, target = read.replace(" ", "").lower(), target.replace(" ", "").lower()
    if target in read:
        return 1.0
    return 1.0 - min(Levenshtein.distance(read, target), len(target)) / len(target)


class Floor:
    """A pipeline with a LoRA, its optimizer, and a step."""

    def __init__(self, settings: Settings, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.settings = settings
        self.pipe = StableDiffusion3Pipeline.from_pretrained(settings.model)
        self.pipe.set_progress_bar_config(disable=True)
        self.transformer = self.pipe.transformer
        for module in (self.transformer, self.pipe.vae):
            module.requires_grad_(False)
        self.transformer.add_adapter(
            LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                init_lora_weights="gaussian",
                target_modules=list(settings.lora_targets),
            )
        )
        self.trained = [p for p in self.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.pipe.scheduler.set_timesteps(settings.num_inference_steps)
        self.sigmas = self.pipe.scheduler.sigmas.clone()
        self.ocr = Recognizer(settings.ocr_batch_size)
        self.generator = torch.Generator().manual_seed(seed)
        self.next_prompt = 0

    def step(self) -> dict[str, float]:
        """Sample, decode, score and train once; returns the seconds of each part."""
        split = Split()
        prompts, targets = self._take()
        with split.part("sample"), torch.no_grad():
            embeds, pooled = self._encode(prompts)
            states, log_probs = self._sample(embeds, pooled)
        with split.part("decode"), torch.no_grad():
            size = self.settings.batch_size
            images = np.concatenate([self._decode(x) for x in states[-1].split(size)])
        with split.part("reward"):
            pairs = zip(self.ocr.read(images), targets, strict=True)
            rewards = torch.tensor([text_reward(read, target) for read, target in pairs])
        with split.part("train"):
            self._train(states, log_probs, embeds, pooled, self._advantages(rewards))
        return split.seconds

    def _take(self) -> tuple[list[str], list[str]]:
        s = self.settings
        rows = [(self.next_prompt + i) % len(s.prompts) for i in range(s.prompts_per_step)]
        self.next_prompt += s.prompts_per_step
        return [s.prompts[i] for i in rows], [
            s.targets[i] for i in rows for _ in range(s.samples_per_prompt)
        ]

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.settings.max_sequence_length,
        )
        each = self.settings.samples_per_prompt
        return embeds.repeat_interleave(each, 0), pooled.repeat_interleave(each, 0)

    def _velocity(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity

    def _transition(self, x: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [M, ...] and standard deviation [M, 1, 1, 1] of the Flow-SDE step."""
        sigma, after = (self.sigmas[i].view(-1, 1, 1, 1) for i in (index, index + 1))
        dt = after - sigma
        g = self.settings.noise_level * (sigma / (1 - sigma.clamp(max=self.sigmas[1]))).sqrt()
        drift = g.square() / (2 * sigma)
        mean = (1 + drift * dt) * x + (1 + drift * (1 - sigma)) * dt * v
        return mean, g * (-dt).sqrt()

    @staticmethod
    def _log_prob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        density = -((sample - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return density.mean(dim=(1, 2, 3))

    def _sample(self, embeds: Tensor, pooled: Tensor) -> tuple[list[Tensor], Tensor]:
        """States x_0 to x_T, each [B, ...], and the log-probs [B, T-1] of all steps but the last."""
        s = self.settings
        factor = self.pipe.vae_scale_factor
        channels = self.transformer.config.in_channels
        shape = (s.rows, channels, s.height // factor, s.width // factor)
        x = torch.randn(shape, generator=self.generator)
        states, log_probs = [x], []
        for i in range(s.num_inference_steps):
            batches = zip(*(t.split(s.batch_size) for t in (x, embeds, pooled)), strict=True)
            index = torch.full((s.rows,), i)
            v = torch.cat(
                [self._velocity(a, self.sigmas[i].expand(len(a)), b, c) for a, b, c in batches]
            )
            if i + 1 < s.num_inference_steps:
                mean, std = self._transition(x, v, index)
                x = mean + std * torch.randn(x.shape, generator=self.generator)
                log_probs.append(self._log_prob(x, mean, std))
            else:
                x = x + (self.sigmas[i + 1] - self.sigmas[i]) * v
            states.append(x)
        return states, torch.stack(log_probs, dim=1)

    def _decode(self, x: Tensor) -> np.ndarray[Any, Any]:
        vae = self.pipe.vae
        latents = x / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(latents, return_dict=False)[0]
        pixels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        images: np.ndarray[Any, Any] = pixels.permute(0, 2, 3, 1).numpy()
        return images

    def _advantages(self, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, self.settings.samples_per_prompt)
        centred = (groups - groups.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
        return centred.flatten().clamp(-self.settings.adv_clip, self.settings.adv_clip)

    def _train(
        self,
        states: list[Tensor],
        log_probs: Tensor,
        embeds: Tensor,
        pooled: Tensor,
        advantages: Tensor,
    ) -> None:
        """One update on all B x (T-1) rows, packed into micro-batches."""
        s, trained_steps = self.settings, log_probs.shape[1]
        stacked = torch.stack(states, dim=1)
        row = torch.arange(s.rows).repeat_interleave(trained_steps)
        step = torch.arange(trained_steps).repeat(s.rows)
        self.transformer.train()
        self.optimizer.zero_grad(set_to_none=True)
        for r, i in zip(row.split(s.micro_batch_size), step.split(s.micro_batch_size), strict=True):
            x = stacked[r, i]
            mean, std = self._transition(
                x, self._velocity(x, self.sigmas[i], embeds[r], pooled[r]), i
            )
            log_prob = self._log_prob(stacked[r, i + 1], mean, std)
            ratio = (log_prob - log_probs[r, i]).exp()
            clipped = ratio.clamp(1 - s.clip, 1 + s.clip)
            terms = torch.maximum(-advantages[r] * ratio, -advantages[r] * clipped)
            (terms.sum() / len(row)).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, s.max_grad_norm)
        self.optimizer.step()
        self.transformer.eval()
