"""Named tensors in a folder: one .npy file each and an index in JSON; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omni_core.engine import CheckpointError

INDEX = "index.json"


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write every tensor (any dtype that numpy has); returns the index."""
    directory.mkdir(parents=True, exist_ok=True)
    index = {}
    for place, (name, tensor) in enumerate(tensors.items()):
        index[name] = f"{place:04d}.npy"
        np.save(directory / index[name], tensor.detach().cpu().numpy(), allow_pickle=False)
    (directory / INDEX).write_text(json.dumps(index, indent=1))
    return directory / INDEX


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read what `write_tensors` wrote.

    Raises:
        CheckpointError: the index or a file is missing or broken; names it.
    """
    try:
        index = json.loads((directory / INDEX).read_text())
        return {
            name: torch.from_numpy(np.load(directory / file, allow_pickle=False))
            for name, file in index.items()
        }
    except (OSError, ValueError) as exc:
        msg = f"cannot read the tensors of {directory}: {exc}"
        raise CheckpointError(msg) from exc
