"""Tokenizers that know single characters and a few words, and text encoders of random weights for them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

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


def clip_encoder(tokenizer: Any, activation: str) -> CLIPTextModelWithProjection:
    """A CLIP text encoder of two layers."""
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


def t5_encoder(tokenizer: Any) -> T5EncoderModel:
    """A T5 encoder of one layer."""
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
