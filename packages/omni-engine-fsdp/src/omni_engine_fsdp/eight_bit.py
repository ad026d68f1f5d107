"""AdamW with moments of 8 bits, which torchao keeps: in blocks of a rank's own shard, each with a scale.

The blocks are what a checkpoint holds, as they are: rounding them again would be another optimizer. So
each rank writes a file of its own, and reads it back at the same number of ranks alone. Moments of
small weights stay in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from omni_core.engine import CheckpointError
from omni_engine_fsdp import sharding

EXTRA = "omni-engine-fsdp[8bit]"
FOLDER = "optimizer_8bit"
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(parameters: Sequence[nn.Parameter], **options: Any) -> Optimizer:
    """Build the optimizer.

    Raises:
        ImportError: torchao is not installed.
        ValueError: weights of float64, which it would round.
    """
    if any(parameter.dtype is torch.float64 for parameter in parameters):
        msg = "optimizer.kind adamw_8bit steps in float32, and model.dtype is float64; take adamw"
        raise ValueError(msg)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels for other devices than this machine's
            optim: Any = import_module("torchao.optim")
    except ImportError as error:
        msg = f"optimizer.kind adamw_8bit needs torchao: pip install '{EXTRA}'"
        raise ImportError(msg) from error
    built: Optimizer = optim.AdamW8bit(parameters, **options)
    return built


def is_eight_bit(optimizer: Optimizer | None) -> bool:
    """Whether moments are in blocks."""
    return optimizer is not None and hasattr(optimizer, "block_size")


def _parts(moment: Tensor) -> dict[str, Tensor]:
    """This rank's part of a moment as plain tensors, sharing their memory."""
    own: Any = sharding.local(moment)
    return {"codes": own.codes, "scale": own.scale} if hasattr(own, "codes") else {"dense": own}


def _file(directory: Path, rank: int) -> Path:
    return directory / FOLDER / f"rank-{rank:05}.safetensors"


def save(moments: Mapping[str, Mapping[str, Tensor]], directory: Path, *, rank: int) -> None:
    """Write this rank's moments below *directory*."""
    path = _file(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{moment}.{part}": tensor.contiguous().cpu()
        for name, state in moments.items()
        for moment in MOMENTS
        for part, tensor in _parts(state[moment]).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def check(names: Iterable[str], directory: Path, *, rank: int) -> None:
    """Look for this rank's moments of the weights *names*, before anything is read.

    Raises:
        CheckpointError: the file is missing or unreadable, or lacks some.
    """
    path = _file(directory, rank)
    try:
        with safe_open(path, framework="pt") as opened:
            there = {key.rpartition(".")[0] for key in opened.keys()}  # noqa: SIM118 -- no mapping
    except (OSError, SafetensorError) as error:
        msg = f"checkpoint {path} cannot be read: {error}"
        raise CheckpointError(msg) from error
    lacking = sorted({f"{name}.{moment}" for name in names for moment in MOMENTS} - there)
    if lacking:
        msg = f"checkpoint {path} lacks {len(lacking)} moments, such as {lacking[0]}"
        raise CheckpointError(msg)


def load(
    optimizer: Any, weights: Mapping[str, nn.Parameter], directory: Path, *, rank: int
) -> None:
    """Make this rank's moments of *weights*, and fill them with what `save` wrote.

    Raises:
        CheckpointError: the file is missing, unreadable or of other weights.
    """
    path = _file(directory, rank)
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        msg = f"checkpoint {path} cannot be read: {error}"
        raise CheckpointError(msg) from error
    for name, parameter in weights.items():
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            state[moment] = optimizer._new_buffer(parameter, moment == "exp_avg")
            for part, tensor in _parts(state[moment]).items():
                found = saved.get(f"{name}.{moment}.{part}")
                if found is None or found.shape != tensor.shape:
                    msg = (
                        f"checkpoint {path}: {name}.{moment}.{part} is missing or of another shape"
                    )
                    raise CheckpointError(msg)
                tensor.copy_(found)
