"""Tensors go through DCP in its safetensors format, everything else is JSON: no pickle is read.

Saved are every adapter but the teachers' (or, without LoRA, every weight of every policy but the
reference) and the optimizer's moments; of a frozen base, of the reference and of each teacher only a hash. A parameter that never had a gradient has no moments: it is saved and restored as such. A
checkpoint can be read at another world size: each rank reads the parts that it holds.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from omni_core import device as devices
from omni_core.engine import CheckpointError
from omni_engine_fsdp import eight_bit
from omni_engine_fsdp.lora import DEFAULT, lora_name, teacher_adapter
from omni_engine_fsdp.optimizer import set_rate
from omni_engine_fsdp.policies import REFERENCE

if TYPE_CHECKING:
    from omni_engine_fsdp.engine import DiffusersFSDPEngine

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


def kind(engine: DiffusersFSDPEngine) -> dict[str, Any]:
    """Say what a checkpoint belongs to: it is loaded into nothing else."""
    config = engine.model_config.lora
    optimizer = engine.optimizer_config
    adapter = None
    if config is not None:
        adapter = {
            "rank": config.rank,
            "alpha": config.alpha,
            "targets": list(engine.lora_targets),
            "names": [name for name in engine.adapters if name not in _teachers(engine)],
        }
        if engine.teachers:
            adapter["teachers"] = dict(engine.teachers)
    experts = {name: type(expert).__name__ for name, expert in engine.denoiser.experts.items()}
    # FSDP2 renames a module's class; the name that it had is kept in the middle.
    experts = {name: said.removeprefix("FSDP") for name, said in experts.items()}
    return {
        "format": FORMAT,
        "family": type(engine.family).__name__,
        "experts": experts,
        "adapter": adapter,
        "policies": list(engine.adapters) if config is None else None,
        "base": engine.base_hash,
        "optimizer": None if optimizer is None else optimizer.kind.value,
        "weights": sorted(_weights(engine)),
    }


def _teachers(engine: DiffusersFSDPEngine) -> set[str]:
    return {teacher_adapter(name) for name in engine.teachers}


def _weights(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Saved weights by `expert.name`, sharded."""
    foreign = _teachers(engine)
    own = {
        f"{expert}.{name}": parameter
        for expert, parameters in engine.parameters.items()
        for name, parameter in parameters.items()
        if parameter.requires_grad or (lora_name(name) or (None,))[0] not in {None, *foreign}
    }
    followers = {
        f"{policy}:{expert}.{name}": parameter
        for policy, copy in engine.copies.items()
        if policy not in (DEFAULT, REFERENCE)
        for expert, parameters in copy.parameters.items()
        for name, parameter in parameters.items()
    }
    return {**own, **followers}


def _moments(engine: DiffusersFSDPEngine) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's state of each trained parameter that has one."""
    if engine.optimizer is None:
        return {}
    state = engine.optimizer.state
    return {name: state[p] for name, p in engine.trained().items() if state.get(p)}


def _tensors(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    tensors = {f"weights.{name}": p.detach() for name, p in _weights(engine).items()}
    if not eight_bit.is_eight_bit(engine.optimizer):
        for name, state in _moments(engine).items():
            tensors.update({f"optimizer.{name}.{moment}": state[moment] for moment in MOMENTS})
    return tensors


def save(engine: DiffusersFSDPEngine, directory: Path) -> dict[str, Any]:
    """Write an engine's tensors below *directory* and return the rest; all ranks call it.

    Args:
        engine: Between updates.
        directory: Made if missing; seen by all ranks.

    Returns:
        JSON data, the same on every rank.

    Raises:
        CheckpointError: it cannot be written, for lack of space or of permission.
    """
    engine.prepare_weights()
    directory.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    ranks = engine.mesh.size
    try:
        with _alone():
            write_tensors(_tensors(engine), storage_writer=writer, no_dist=ranks == 1)
        if eight_bit.is_eight_bit(engine.optimizer):
            trained = engine.trained()
            eight_bit.save(_moments(engine), trained, directory, rank=engine.mesh.rank)
    except (SafetensorError, CheckpointException, OSError) as error:
        msg = f"checkpoint {directory} cannot be written: {_cause(error)}"
        raise CheckpointError(msg) from error
    optimizer = engine.optimizer
    state: dict[str, Any] = {
        "kind": kind(engine),
        "world_size": ranks,
        "weight_version": engine.weight_version,
        "nonfinite_steps": engine.nonfinite_steps,
        "ema_updates": engine.ema_updates,
        "reference": engine.reference_hash,
        "generators": _gather_generators(engine),
    }
    if optimizer is not None:
        steps = {name: float(moments["step"]) for name, moments in _moments(engine).items()}
        state["optimizer_steps"] = steps
        state["schedule_steps"] = engine.schedule_steps
    return state


def load(engine: DiffusersFSDPEngine, directory: Path, state: Mapping[str, Any]) -> None:
    """Restore what `save` wrote and returned; all ranks call it.

    The optimizer goes on with the moments that were saved and the options of its own config, at the
    place of the schedule that was saved.

    Raises:
        CheckpointError: of another kind of run, incomplete or unreadable; nothing is changed by the
            first two.
    """
    _check_kind(engine, state)
    engine.compare_reference(state.get("reference"))
    if eight_bit.is_eight_bit(engine.optimizer):
        trained = engine.trained()
        stepped = {name: trained[name] for name in state["optimizer_steps"]}
        eight_bit.check(stepped, directory, ranks=state["world_size"])
    engine.prepare_weights()
    wanted = _weights(engine)
    tensors = {f"weights.{name}": p.detach() for name, p in wanted.items()}
    steps: Mapping[str, float] = state.get("optimizer_steps", {})
    dense = {} if eight_bit.is_eight_bit(engine.optimizer) else steps
    moments = {
        name: {moment: torch.zeros_like(wanted[name].detach()) for moment in MOMENTS}
        for name in dense
    }
    for name, values in moments.items():
        tensors.update({f"optimizer.{name}.{moment}": value for moment, value in values.items()})
    _read(directory, tensors)
    engine.expect_reference(state.get("reference"))
    engine.optimizer_zero_grad()
    if engine.optimizer is not None:
        _restore_optimizer(engine, directory, state, moments)
    engine.weight_version = state["weight_version"]
    engine.nonfinite_steps = state["nonfinite_steps"]
    engine.ema_updates = state["ema_updates"]
    if state["world_size"] == engine.mesh.size:
        own = state["generators"][engine.mesh.rank]
        devices.set_rng_state({name: _decoded(text) for name, text in own.items()})


def _restore_optimizer(
    engine: DiffusersFSDPEngine,
    directory: Path,
    state: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    optimizer, weights = engine.optimizer, engine.trained()
    assert optimizer is not None
    steps: Mapping[str, float] = state["optimizer_steps"]
    optimizer.state.clear()
    for name, values in moments.items():
        optimizer.state[weights[name]] = dict(values)
    if eight_bit.is_eight_bit(optimizer):
        own = {name: weights[name] for name in steps}
        eight_bit.load(optimizer, own, directory, ranks=state["world_size"])
    for name, count in steps.items():
        # A fused step counts where the weights lie.
        device = weights[name].device if optimizer.defaults.get("fused") else None
        optimizer.state[weights[name]]["step"] = torch.tensor(count, device=device)
    engine.schedule_steps = state["schedule_steps"]
    set_rate(optimizer, engine.rate)
    engine.rest_moments()


def _check_kind(engine: DiffusersFSDPEngine, state: Mapping[str, Any]) -> None:
    saved, mine = state.get("kind"), kind(engine)
    if not isinstance(saved, Mapping):
        msg = "the checkpoint's state says no `kind`: it was not written by this engine"
        raise CheckpointError(msg)
    differing = [key for key in mine if saved.get(key) != mine[key]]
    if differing:
        lines = [
            f"  {key}: {_difference(saved.get(key), mine[key])}"
            for key in differing
            if key != "weights" or len(differing) == 1
        ]
        msg = "the checkpoint is of another kind of run:\n" + "\n".join(lines)
        raise CheckpointError(msg)


def _difference(saved: Any, mine: Any) -> str:
    if isinstance(saved, list) and isinstance(mine, list):
        only_saved = [name for name in saved if name not in mine][:5]
        only_mine = [name for name in mine if name not in saved][:5]
        return f"only in the checkpoint {only_saved}, only in this run {only_mine} (first five)"
    return f"checkpoint {saved!r}, this run {mine!r}"


def _read(directory: Path, tensors: dict[str, Tensor]) -> None:
    if not directory.is_dir():
        msg = f"no checkpoint at {directory}"
        raise CheckpointError(msg)
    reader = HuggingFaceStorageReader(str(directory))
    try:
        there = reader.read_metadata().state_dict_metadata
        missing = sorted(set(tensors) - set(there))
        if missing:
            msg = f"checkpoint {directory} lacks {len(missing)} tensors, such as {missing[0]}"
            raise CheckpointError(msg)
        for name, tensor in tensors.items():
            shape = tuple(getattr(there[name], "size", ()))
            if shape != tuple(tensor.shape):
                msg = f"checkpoint {directory}: {name} is {shape}, this run's is {tuple(tensor.shape)}"
                raise CheckpointError(msg)
        # Each rank plans and reads its own parts: no plan travels, and no rank waits for another.
        with _alone():
            read_tensors(tensors, storage_reader=reader, no_dist=True)
    except (SafetensorError, CheckpointException, OSError) as error:
        msg = f"checkpoint {directory} cannot be read: {_cause(error)}"
        raise CheckpointError(msg) from error


def _cause(error: BaseException) -> BaseException:
    """Take what a rank raised out of DCP's own exception, which is a BaseException of many lines."""
    if isinstance(error, CheckpointException):
        return next((cause for cause, _ in error.failures.values()), error)
    return error


@contextmanager
def _alone() -> Iterator[None]:
    """DCP warns a process that it works alone; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _gather_generators(engine: DiffusersFSDPEngine) -> list[dict[str, str]]:
    """Generator states of every rank, base64; gathered as tensors."""
    own = devices.rng_state(engine.device)
    gathered: list[dict[str, str]] = [{} for _ in range(engine.mesh.size)]
    for name, state in own.items():
        parts = [torch.empty_like(state) for _ in gathered]
        if len(gathered) > 1:
            dist.all_gather(parts, state, group=engine.mesh.group)
        else:
            parts = [state]
        for rank, part in enumerate(parts):
            gathered[rank][name] = base64.b64encode(part.numpy().tobytes()).decode()
    return gathered


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
