"""Tokenizers that know single characters and a few words, and text encoders of random weights for them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CHARACTERS = sorted(set(string.printable) - set(string.whitespace))
WORDS = ("a", "sign", "that", "reads", "red", "blue", "photo", "of", "the")
CLIP_LENGTH = 16
T5_DIM = 32
CLIP_DIM = 8
QWEN_DIM = 16
GEMMA_DIM = 16
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What a chat model's tokenizer makes of messages."""


def clip_encoder(
    tokenizer: Any, activation: str, kind: type[Any] = CLIPTextModelWithProjection
) -> Any:
    """A CLIP text encoder of two layers."""
    return kind(
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


def t5_encoder(
    tokenizer: Any, kind: type[Any] = T5EncoderModel, config: type[Any] = T5Config
) -> Any:
    """A T5 encoder of one layer."""
    return kind(
        config(
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


def qwen_tokenizer(*special: str) -> Qwen2Tokenizer:
    """A Qwen tokenizer that knows single characters and *special* tokens, with a chat template."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    for extra in ("\u0120", "\u010a", "<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocabulary.setdefault(extra, len(vocabulary))
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token="<|endoftext|>", chat_template=CHAT
    )
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def qwen3_config(tokenizer: Any, *, layers: int) -> Qwen3Config:
    """Of a Qwen3 model."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=QWEN_DIM,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,  # so that prompts differ by something
        bos_token_id=None,
        eos_token_id=None,
    )


def gemma_tokenizer() -> GemmaTokenizer:
    """A Gemma tokenizer that knows single characters."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\u2581", *CHARACTERS]
    return GemmaTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])


def gemma_encoder(tokenizer: Any) -> Gemma2Model:
    """A Gemma2 encoder of one layer."""
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=GEMMA_DIM,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            max_position_embeddings=4096,
            initializer_range=0.3,
        )
    )
