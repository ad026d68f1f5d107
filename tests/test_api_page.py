"""The public names are there, each with its members, a signature and a docstring, and on the API page."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api" / "workers.md"
LISTED = re.findall(r"^::: (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

ENGINE = """initialize train_mode eval_mode forward_step forward_backward_batch train_batch infer_batch
    optimizer_step optimizer_zero_grad lr_scheduler_step get_data_parallel_rank get_data_parallel_size
    get_data_parallel_group is_mp_src_rank_with_outputs save_checkpoint load_checkpoint get_per_tensor_param
    to disable_adapter set_loss_fn"""
ADAPTERS = "copy_adapter ema_update_adapter use_adapter disable_adapter"
MEMBERS = {
    "omni_core.BaseEngine": ENGINE,
    "omni_core.EngineRegistry": "register get new",
    "omni_core.BaseRollout": "submit poll cancel pause update resume state",
    "omni_engine_fsdp.DiffusersFSDPEngine": ENGINE,
    "omni_engine_fsdp.PPODiffusersFSDPEngine": f"{ENGINE} prepare_model_inputs prepare_model_outputs",
    "omni_engine_fsdp.ForwardDiffusersFSDPEngine": ENGINE,
    "omni_engine_fsdp.LoRAAdapterMixin": ADAPTERS,
    "omni_trainer.TrainingWorker": """reset set_loss_fn to train_mini_batch train_batch infer_batch
        save_checkpoint load_checkpoint copy_adapter ema_update_adapter""",
    "omni_trainer.ActorRolloutRefWorker": """init_model infer_actor_batch infer_ref_batch update_actor
        update_weights save_checkpoint load_checkpoint copy_adapter ema_update_adapter""",
    "omni_trainer.ServerAdapter": "submit update pause resume sleep",
}
"""Class -> methods that its users rely on."""
OPTIONS = {
    "omni_trainer.TrainingWorkerConfig": "model engine optimizer checkpoint",
    "omni_core.DiffusionModelConfig": "path lora pipeline dtype",
    "omni_core.DiffusionActorConfig": "model engine optimizer checkpoint loss",
    "omni_core.DiffusionLossConfig": "name options",
    "omni_core.DiffusionRolloutConfig": "samples_per_prompt batch_size sampling",
    "omni_core.DiffusionRolloutAlgoConfig": "kind noise_level window_size window_range adapter",
    "omni_core.DiffusionPipelineConfig": "height width max_sequence_length",
    "omni_core.DiffusionSamplingConfig": "num_inference_steps guidance_scale negative_prompt schedule",
    "omni_core.EngineConfig": "micro_batch_size gradient_checkpointing seed device",
    "omni_core.OptimizerConfig": "lr betas weight_decay max_grad_norm schedule warmup_steps",
    "omni_core.CheckpointConfig": "every keep",
    "omni_engine_fsdp.FSDPEngineConfig": "shard_base reshard_after_forward micro_batch_size",
    "omni_engine_fsdp.FSDPDiffusionActorConfig": "model engine optimizer checkpoint loss",
}
"""attrs class -> fields."""
FUNCTIONS = (
    "omni_core.diffusion_loss",
    "omni_core.embeds_padding_2_no_padding",
    "omni_core.ppo_loss",
    "omni_core.sft_loss",
    "omni_core.value_loss",
)


def public(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [*MEMBERS, *OPTIONS, *FUNCTIONS])
def test_a_public_name_is_described_and_on_the_page(name: str) -> None:
    found = public(name)
    assert inspect.getdoc(found)
    assert f"{found.__module__}.{found.__qualname__}" in LISTED


@pytest.mark.parametrize(
    ("name", "member"), [(name, one) for name, given in MEMBERS.items() for one in given.split()]
)
def test_a_member_has_a_signature_and_a_docstring(name: str, member: str) -> None:
    found = inspect.getattr_static(public(name), member)
    assert (inspect.getdoc(getattr(public(name), member)) or "").strip()
    if not isinstance(found, property):
        said = inspect.signature(getattr(public(name), member))
        assert all(
            parameter.annotation is not inspect.Parameter.empty
            for place, parameter in enumerate(said.parameters.values())
            if parameter.name != "self" or place > 0
        )


@pytest.mark.parametrize(("name", "fields"), OPTIONS.items())
def test_options_have_their_fields(name: str, fields: str) -> None:
    assert set(fields.split()) <= {field.name for field in attrs.fields(public(name))}


@pytest.mark.parametrize("name", LISTED)
def test_what_the_page_names_is_there(name: str) -> None:
    assert inspect.getdoc(public(name))
