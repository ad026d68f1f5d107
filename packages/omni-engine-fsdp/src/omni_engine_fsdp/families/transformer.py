"""What denoisers over one diffusers transformer share: its blocks, its precision, two branches as one batch.

Letters: B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from omni_core.model import Denoiser, Guidance
from omni_core.trajectory import Conditioning

C = TypeVar("C", bound=Conditioning)

EXPERT = "transformer"
TEXT = "text"
"""The stream of a sequence plan that the prompt is."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Projections of an attention of one stream."""
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Projections of an attention of two streams, image and text."""


class TransformerDenoiser(Denoiser):
    """One expert, `transformer`. A family derives from it and writes `velocity`.

    Timesteps stay float32 up to the transformer's sinusoids, which are cast: in bf16 it would be
    conditioned on 976 instead of 978.26. A wrapper around the transformer must therefore not cast its
    inputs (FSDP2: `cast_forward_inputs=False`).
    """

    targets: ClassVar[tuple[str, ...]]
    """`lora_targets`, unless they depend on the module."""
    blocks: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """Module lists of the transformer whose members are sharded each as a unit."""

    def __init__(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.transformer = transformer
        self.dtype = dtype
        """What latents and conditioning are cast to: the transformer's computation."""

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """One: `transformer`."""
        return {EXPERT: self.transformer}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """What the family says."""
        return self.targets

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        """Return the transformer blocks."""
        lists: list[Any] = [getattr(expert, name) for name in self.blocks]
        return [block for blocks in lists for block in blocks]

    def widened(self, predicted: Tensor) -> Tensor:
        """Cast to float32, or to float64 where the transformer computes in it: branches combine there."""
        return predicted.to(torch.float64 if self.dtype == torch.float64 else torch.float32)


def conditioning_of(found: Conditioning, kind: type[C]) -> C:
    """Return the family's own conditioning.

    Raises:
        TypeError: it is another family's.
    """
    if not isinstance(found, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(found).__name__}")
    return found


def negative_of(*negative: Tensor | None) -> list[Tensor]:
    """Return the negative branch's tensors.

    Raises:
        ValueError: one is missing.
    """
    found = [value for value in negative if value is not None]
    if len(found) < len(negative):
        raise ValueError(
            "guidance needs a negative prompt, and this conditioning was encoded without guidance"
        )
    return found


def twice(value: Tensor) -> Tensor:
    """Repeat rows for two branches: [2B, ...]."""
    return torch.cat([value, value])


def guided(both: Tensor, guidance: Guidance) -> Tensor:
    """Combine two branches as classifier-free guidance does (arXiv 2207.12598).

    Args:
        both: [2B, ...], the negative branch first.
        guidance: Its scale is 1.0 for the conditional branch alone.
    """
    negative, positive = both.chunk(2)
    return negative + guidance.scale * (positive - negative)


@contextmanager
def float32_inputs(transformer: nn.Module, embedding: nn.Module, **scales: float) -> Iterator[None]:
    """Give a module of sinusoids its inputs in float32, where the transformer would round them first.

    They are taken as the transformer gets them: of its rank's rows alone, where ranks share a batch.

    Args:
        transformer: Called once within the context, with each of *scales* by keyword.
        embedding: Without weights of its own; called for each of them that is not None, in order.
        scales: Keyword -> what the transformer multiplies it by for the sinusoids.
    """
    left: list[Tensor] = []

    def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args
        left.extend(kwargs[k] * scale for k, scale in scales.items() if kwargs[k] is not None)

    def exact(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (left.pop(0), *inputs[1:])

    handles = (
        transformer.register_forward_pre_hook(given, with_kwargs=True),
        embedding.register_forward_pre_hook(exact),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert not left, f"{len(left)} inputs were not asked for"


def own_output(module: nn.Module) -> None:
    """Let a module whose output is a view return it in memory of its own: FSDP2 hangs its hooks on it."""

    def cloned(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in output)

    module.register_forward_hook(cloned)


def check_scale(guidance: Guidance, pipeline: str) -> None:
    """Check a classifier-free scale.

    Raises:
        ValueError: it is below 1, which stock pipelines take for none.
    """
    if guidance.scale < 1.0:
        raise ValueError(
            f"guidance_scale {guidance.scale}: {pipeline} guides above 1 only; take 1.0 for no guidance"
        )
