"""A family is names and shapes: how the engine's pipeline is asked, and what its tensors are called.

Nothing here computes a velocity or steps: the engine's own pipeline does, with its scheduler replaced.
Letters: B rows, C H W latents.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.reverse_step import Latents
from omni_core.trajectory import Conditioning, Media, SamplingSpec

IMAGE = "image"

Encoded = tuple[Tensor, ...]
"""What `encode_prompt` returned, [n, ...] each."""


@attrs.frozen
class Folder:
    """A pipeline in the diffusers folder layout: its index and configs, no weights."""

    root: Path

    def pipeline_class(self) -> str:
        """Read the index's class.

        Raises:
            FileNotFoundError: no index in the folder.
            ValueError: it names no class.
        """
        name = self.json("model_index.json").get("_class_name")
        if not isinstance(name, str):
            msg = f"{self.root / 'model_index.json'} names no pipeline class"
            raise ValueError(msg)
        return name

    def config(self, component: str) -> Mapping[str, Any]:
        """Read a component's config.json."""
        return self.json(f"{component}/config.json")

    def json(self, name: str) -> Mapping[str, Any]:
        """Read one of its files.

        Raises:
            FileNotFoundError: it is not there.
        """
        found: Mapping[str, Any] = json.loads((self.root / name).read_text(encoding="utf-8"))
        return found


class EngineFamily(ABC):
    """What is particular about one pipeline class of the engine."""

    name: str
    """As in `model.family`."""
    pipeline_class: str
    """Of model_index.json, and of the engine."""
    pipeline_module: str
    """Where the engine has that class."""
    least_guidance: float = 1.0
    """Smallest guidance scale that the pipeline takes for what it is; 1.0 is none."""

    float_timestep: bool = False
    """The transformer takes `timestep` in float32, though the pipeline rounds it to its own precision (in
    bfloat16 976 instead of 978.26): it is given as training gives it."""

    # -- asking ------------------------------------------------------------------------------------

    @abstractmethod
    def guidance_fields(self, scale: float) -> dict[str, Any]:
        """Return the engine's sampling parameters that mean a guidance scale."""

    @abstractmethod
    def latent_shapes(self, folder: Folder, spec: SamplingSpec) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample's latents, without the batch axis.

        Raises:
            ValueError: a size that does not fit; names the nearest that do.
        """

    # -- latents as the pipeline holds them --------------------------------------------------------

    def to_engine(self, latents: Latents) -> Any:
        """Latents [B, ...] as the pipeline passes them to its scheduler."""
        return latents[IMAGE]

    def from_engine(self, value: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Undo `to_engine`; *shapes* as `latent_shapes` returns them."""
        del shapes
        return {IMAGE: value}

    # -- conditioning ------------------------------------------------------------------------------

    def join(self, rows: Sequence[Encoded]) -> Encoded:
        """Put prompts that were encoded alone ([1, ...] each) into one batch."""
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    @abstractmethod
    def conditioning(self, positive: Encoded, negative: Encoded | None) -> Conditioning:
        """Name what `encode_prompt` returned for one prompt, [1, ...], and for the negative one."""

    # -- what comes out ----------------------------------------------------------------------------

    def media(self, decoded: Tensor) -> Media:
        """Turn what the pipeline decoded, [B, 3, H, W] in -1 to 1, into pictures."""
        pixels = (decoded * 0.5 + 0.5).clamp(0, 1).float()
        return Media(image=(pixels * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1))


def check_sides(spec: SamplingSpec, *, unit: int, largest: int | None = None) -> None:
    """Check that a picture's sides are multiples of *unit* pixels, up to *largest*.

    Raises:
        ValueError: a side does not fit, with the nearest that do; or more frames than one.
    """
    if spec.num_frames != 1:
        msg = f"num_frames {spec.num_frames}: this family makes images; take 1"
        raise ValueError(msg)
    for name in ("height", "width"):
        pixels: int = getattr(spec, name)
        if pixels > 0 and pixels % unit == 0 and (largest is None or pixels <= largest):
            continue
        most = largest if largest is not None else max(pixels, unit) + unit
        below = min(max(pixels // unit * unit, unit), most)
        above = min(-(-max(pixels, unit) // unit) * unit, most)
        fits = " or ".join(str(side) for side in sorted({below, above}))
        bound = "" if largest is None else f" up to {largest}"
        msg = f"{name} {pixels} does not fit: a multiple of {unit}{bound} does; nearest: {fits}"
        raise ValueError(msg)
