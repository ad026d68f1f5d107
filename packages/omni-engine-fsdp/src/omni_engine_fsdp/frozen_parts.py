"""What a pipeline has beside its experts (encoders, codec), told apart by a fingerprint of the files.

A fingerprint covers every tensor's name, shape and format and its first row: enough to tell other weights,
without reading gigabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs
import torch
from safetensors import safe_open

from omni_core.resources import resolve
from omni_engine_fsdp.families.folder import INDEX, PipelineFolder


@attrs.frozen(kw_only=True)
class Fingerprint:
    """Of one component's weights, as they are stored."""

    hash: str
    dtypes: tuple[str, ...]
    """Formats of its tensors: the same weights in another format have another hash."""

    def contradicts(self, other: Fingerprint) -> bool:
        """Whether the two are of different weights; unknown, so false, where the formats differ."""
        return self.dtypes == other.dtypes and self.hash != other.hash


def frozen_parts(path: str, experts: Collection[str]) -> Mapping[str, Fingerprint]:
    """Fingerprints of a pipeline's components that have weights.

    Args:
        path: Of the pipeline, as in `model.path`.
        experts: Components that are trained, left out.

    Returns:
        Component -> fingerprint; empty where *path* is no pipeline in the diffusers layout.
    """
    if not (resolve(path) / INDEX).is_file():
        return {}
    folder = PipelineFolder.open(path)
    files = {
        name: sorted((folder.root / name).glob("*.safetensors"))
        for name in sorted(set(folder.components) - set(experts))
    }
    return {name: _fingerprint(found) for name, found in files.items() if found}


def _fingerprint(files: Collection[Path]) -> Fingerprint:
    rows: dict[str, tuple[str, bytes]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                shape = list(part.get_shape())
                row = part[:1] if shape else file.get_tensor(name)
                plain = row.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                rows[name] = part.get_dtype(), f"{name} {shape} ".encode() + plain
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(rows):
        digest.update(rows[name][1])
    return Fingerprint(hash=digest.hexdigest(), dtypes=tuple(sorted({r[0] for r in rows.values()})))
