"""Pipelines of random weights in the standard diffusers folder layout: what tests and smoke runs need.

Every part is real (classes, tokenizers, files); only the sizes are small: under 1 MB, made in about a
second after the imports. `python tools/tiny_models.py DIRECTORY` writes one.

A picture is at most 32 x 32 px, sides in multiples of 8 (the VAE scales by 4, a patch is 2 x 2); CLIP
reads 16 tokens, and T5 as many as it is asked for.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CHARACTERS = sorted(set(string.printable) - set(string.whitespace))
WORDS = ("a", "sign", "that", "reads", "red", "blue", "photo", "of", "the")
CLIP_LENGTH = 16
T5_DIM = 32
CLIP_DIM = 8


def build_tiny_sd3(
    directory: Path, *, seed: int = 0, shift: float = 3.0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a StableDiffusion3Pipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        shift: Of the scheduler.
        dtype: What the weights are stored in.

    Returns:
        *directory*.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _sd3(shift)
    if dtype is not torch.float32:
        pipeline.to(dtype)
    pipeline.save_pretrained(directory)
    return directory


def _sd3(shift: float) -> StableDiffusion3Pipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_DIM,
            caption_projection_dim=32,
            pooled_projection_dim=2 * CLIP_DIM,
            pos_embed_max_size=4,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 16, 16),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            scaling_factor=1.3,
            shift_factor=0.05,
        ),
        text_encoder=_clip_encoder(clip, "quick_gelu"),
        tokenizer=clip,
        text_encoder_2=_clip_encoder(clip, "gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=_t5_encoder(t5),
        tokenizer_3=t5,
    )


def _clip_encoder(tokenizer: Any, activation: str) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=CLIP_DIM,
            intermediate_size=16,
            projection_dim=CLIP_DIM,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            hidden_act=activation,
            initializer_factor=4.0,  # so that prompts differ by something
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5_encoder(tokenizer: Any) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=T5_DIM,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def clip_tokenizer(
    characters: Sequence[str] = CHARACTERS, words: Sequence[str] = WORDS, length: int = CLIP_LENGTH
) -> CLIPTokenizer:
    """A CLIP tokenizer that knows single characters and a few words, cut at *length* tokens."""
    tokens = [*characters, *(f"{character}</w>" for character in characters)]
    merges: list[tuple[str, str]] = []
    for word in words:
        left = word[0]
        for place, character in enumerate(word[1:], start=2):
            right = character + ("</w>" if place == len(word) else "")
            merges.append((left, right))
            left += right
            tokens.append(left)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(
        vocab=vocabulary, merges=list(dict.fromkeys(merges)), model_max_length=length
    )


def t5_tokenizer(
    characters: Sequence[str] = CHARACTERS, words: Sequence[str] = WORDS, length: int = 512
) -> T5Tokenizer:
    """A T5 tokenizer over single characters and a few words, cut at *length* tokens."""
    space = "\u2581"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (space, -2.0)]
    pieces += [(character, -3.0) for character in characters]
    pieces += [(space + word, -1.0) for word in words]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def main() -> None:
    """Write the pipeline that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    print(build_tiny_sd3(options.directory, seed=options.seed, shift=options.shift, dtype=dtype))


if __name__ == "__main__":
    main()
