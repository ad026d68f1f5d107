"""Noise belongs to a sample: its seed comes from what the sample is, never from where it is computed.

Every draw has a CPU generator of its own, in float32, and is moved afterwards, so a sample's noise is
the same alone, in any batch, at any position and on any number of workers; and step noise is
addressed by step, so a resumed or replayed trajectory needs no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Modality -> shape of one sample, without the batch axis."""


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) from an ordered list of texts and integers.

    It is the first 8 bytes, big endian and without the top bit, of BLAKE2b over the parts. Each part
    is written as its type (`s` or `i`), the length of its UTF-8 text in decimal, `:`, and the text
    (decimal for an integer), so ("ab", "c"), ("a", "bc") and (1,), ("1",) are all different. The
    encoding is part of every run's record: it does not change.

    Raises:
        TypeError: a part that is neither text nor integer (a bool is neither).
        ValueError: no part.
    """
    if not parts:
        raise ValueError("a seed is derived from at least one part")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise TypeError(f"a seed is derived from texts and integers, got {part!r}")
        text = str(part).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big") & (2**63 - 1)


def sample_seed(
    *, purpose: str, base_seed: int, step: int, row_id: str | int, occurrence: int, k: int
) -> int:
    """The seed of one sample, in [0, 2**63): `derive_seed` of "sample" and the arguments in order.

    Args:
        purpose: what it is drawn for, such as `rollout` or `validation`.
        base_seed: the run's named seed for that purpose.
        step: training step (a resumed run counts on, so step t gives t's seeds).
        row_id: the data row's id.
        occurrence: how often this row came before within the step.
        k: the sample's number within its group.
    """
    return derive_seed("sample", purpose, base_seed, step, row_id, occurrence, k)


def initial_noise(seed: int, shapes: Shapes) -> dict[str, Tensor]:
    """Latents that a sample starts from: modality -> float32 [1, *shape] on the CPU.

    One generator draws the modalities in the mapping's order. For one modality that is
    `torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed))`, what a stock diffusers
    pipeline draws when given that generator.
    """
    return _draw(seed, shapes)


def step_noise(seed: int, step_index: int, shapes: Shapes) -> dict[str, Tensor]:
    """Noise of step `step_index` of the sample with that seed: modality -> float32 [1, *shape] on the CPU.

    It depends on nothing but the arguments, so steps may be drawn in any order, alone or again.
    """
    return _draw(derive_seed("step-noise", seed, step_index), shapes)


def initial_noise_batch(seeds: Sequence[int], shapes: Shapes) -> dict[str, Tensor]:
    """`initial_noise` of each seed: modality -> float32 [B, *shape] on the CPU."""
    return _stack(seeds, lambda seed: initial_noise(seed, shapes))


def step_noise_batch(seeds: Sequence[int], step_index: int, shapes: Shapes) -> dict[str, Tensor]:
    """`step_noise` of each seed at one step: modality -> float32 [B, *shape] on the CPU."""
    return _stack(seeds, lambda seed: step_noise(seed, step_index, shapes))


def _draw(seed: int, shapes: Shapes) -> dict[str, Tensor]:
    if not shapes:
        raise ValueError("there is no modality to draw noise for")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }


def _stack(seeds: Sequence[int], draw: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    if not seeds:
        raise ValueError("a batch of noise needs at least one seed")
    rows = [draw(seed) for seed in seeds]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
