"""The engine's own pipelines, recording: each family's class with one mixin in front.

The mixin calls the pipeline's own `forward` with another scheduler, listens at `encode_prompt` and at
the guidance, and adds what was recorded to the outputs. It holds no denoising loop. Letters: B rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.registry import register_diffusion_model

from omni_core.choices import StepKind
from omni_core.rollout_step import StepRule
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import SamplingSpec
from omni_rollout_vllm.families import FAMILIES, EngineFamily, Folder
from omni_rollout_vllm.families.family import Encoded
from omni_rollout_vllm.recording import PipelineError, RecordingScheduler

KEY = "omni_rollout"
"""Of a request's extra arguments: the row that it is."""
PREFIX = "Recording"
KEPT_PROMPTS = 64
"""Encoded prompts that a pipeline remembers; its encoders never change."""


@attrs.frozen(kw_only=True)
class RowOrder:
    """One row of a batch, as its engine request carries it."""

    batch: str
    size: int
    """Rows of the batch: the engine has to run them together."""
    seed: int
    window: tuple[int, ...]
    sampling: SamplingSpec
    decode: bool


@attrs.define(eq=False)
class Listening:
    """What is heard of one `forward`."""

    branches: list[tuple[list[str], list[Encoded]]] = attrs.field(factory=list)
    """Of each call of `encode_prompt`: each row's text, and what it was encoded to."""
    max_sequence_length: int | None = None
    guidance: set[float] = attrs.field(factory=set)
    """Scales that steps were guided with; 1.0 for none."""


class RecordingMixin:
    """Stands before a pipeline class of the engine; `family` is its family."""

    family: EngineFamily
    supports_request_batch = True

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self._listening: Listening | None = None
        self._prompts: OrderedDict[tuple[str, int | None], Encoded] = OrderedDict()
        self._loras: dict[int, tuple[dict[str, Any], Mapping[str, Tensor]]] = {}
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, LinearBase):
                # Else a CPU build packs the weight and drops the original, and no update finds it.
                module.skip_weight_relayout = True

    # -- one batch ---------------------------------------------------------------------------------

    def forward(self, req: Any) -> list[DiffusionOutput]:
        """Run a batch of the engine's requests, one row each.

        Raises:
            PipelineError: the engine split the batch, or the pipeline does something else than a
                trajectory records.
        """
        orders: list[RowOrder | None] = [
            (one.extra_args or {}).get(KEY) for one in req.sampling_params_list
        ]
        rows = [order for order in orders if order is not None]
        if not rows:
            return super().forward(req)  # type: ignore[misc,no-any-return]
        if {(row.batch, row.size) for row in rows} != {(rows[0].batch, len(orders))}:
            said = ", ".join(sorted({f"{row.batch} ({row.size} rows)" for row in rows}))
            msg = f"the engine ran {len(orders)} requests of {said} as one batch"
            raise PipelineError(msg)
        scheduler = self._scheduler_of(rows)
        noise = scheduler.initial()
        for place, one in enumerate(req.sampling_params_list):
            one.latents = noise[place : place + 1]
        stock, self.scheduler = self.scheduler, scheduler  # type: ignore[has-type]
        self._listening = listening = Listening()
        try:
            outputs: list[DiffusionOutput] = super().forward(req)  # type: ignore[misc]
        finally:
            self.scheduler, self._listening = stock, None
        return self._outputs(rows, outputs, scheduler, listening)

    def _scheduler_of(self, rows: Sequence[RowOrder]) -> RecordingScheduler:
        sampling = rows[0].sampling
        return RecordingScheduler(
            StepRule(
                schedule=FlowMatchSchedule.from_values(sampling.sigmas),
                kind=StepKind.parse(sampling.kind),
                noise_level=sampling.noise_level,
            ),
            seeds=[row.seed for row in rows],
            windows=[row.window for row in rows],
            shapes=self.family.latent_shapes(self._folder, sampling),
            family=self.family,
            config=self.scheduler.config,
            device=torch.device(self.device),  # type: ignore[attr-defined]
        )

    @property
    def _folder(self) -> Folder:
        return Folder(Path(self.od_config.model))  # type: ignore[attr-defined]

    def _outputs(
        self,
        rows: Sequence[RowOrder],
        outputs: Sequence[DiffusionOutput],
        scheduler: RecordingScheduler,
        heard: Listening,
    ) -> list[DiffusionOutput]:
        recorded = scheduler.recorded()
        facts = {**_facts(heard, scheduler), "device": str(scheduler.device)}
        shipped: set[str] = set()
        found = []
        for place, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            one = slice(place, place + 1)
            carried: dict[str, Any] = {
                "facts": facts,
                "latents": {name: value[one].cpu() for name, value in recorded.latents.items()},
                "log_probs": recorded.log_probs[one].cpu(),
                "text": heard.branches[0][0][place],
            }
            if carried["text"] not in shipped:
                shipped.add(carried["text"])
                carried["encoded"] = [
                    tuple(part.cpu() for part in encoded[place]) for _, encoded in heard.branches
                ]
            if row.decode:
                media = self.family.media(output.output)
                carried["media"] = {"image": None if media.image is None else media.image.cpu()}
            output.output = {"payload": {}, "metadata": {KEY: carried}}
            found.append(output)
        return found

    # -- listening ---------------------------------------------------------------------------------

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Encode each prompt once, alone, so that a row's conditioning does not depend on its batch."""
        original = super().encode_prompt  # type: ignore[misc]
        if self._listening is None:
            return original(*args, **kwargs)
        texts = kwargs.get("prompt")
        if args or not isinstance(texts, list):
            msg = f"{type(self).__name__}: encode_prompt is not called with prompt=[...]"
            raise PipelineError(msg)
        length: int | None = kwargs.get("max_sequence_length")
        rows = [self._encoded(original, text, length, kwargs) for text in texts]
        self._listening.max_sequence_length = length
        self._listening.branches.append((texts, rows))
        return self.family.join(rows)

    def _encoded(
        self,
        original: Callable[..., Any],
        text: str,
        length: int | None,
        kwargs: Mapping[str, Any],
    ) -> Encoded:
        key = (text, length)
        if key not in self._prompts:
            self._prompts[key] = tuple(original(**{**kwargs, "prompt": [text]}))
            while len(self._prompts) > KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def predict_noise_maybe_with_cfg(
        self, do_true_cfg: bool, true_cfg_scale: float, *args: Any, **kwargs: Any
    ) -> Any:
        """Note how the step is guided."""
        if self._listening is not None:
            self._listening.guidance.add(float(true_cfg_scale) if do_true_cfg else 1.0)
        return super().predict_noise_maybe_with_cfg(  # type: ignore[misc]
            do_true_cfg, true_cfg_scale, *args, **kwargs
        )

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        """Give the transformer the timestep as it is, where the pipeline rounded it."""
        given = kwargs.get("timestep")
        if self._listening is not None and self.family.float_timestep and given is not None:
            kwargs["timestep"] = self.scheduler.timestep.expand(len(given))
        return super().predict_noise(*args, **kwargs)  # type: ignore[misc]

    # -- adapters from memory ----------------------------------------------------------------------

    def hold_adapter(
        self, number: int, config: dict[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Keep an adapter's tensors for the engine's LoRA manager to load."""
        self._loras[number] = (config, tensors)

    def _load_diffusion_lora_adapter(
        self, *, lora_request: Any, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """What the engine's LoRA manager asks before it looks at files.

        Raises:
            KeyError: no tensors are held under that number.
        """
        del lora_path
        config, tensors = self._loras[lora_request.lora_int_id]
        helper = PEFTHelper.from_dict(config)
        copies = {name: value.clone() for name, value in tensors.items()}  # scaled in place later
        model = LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id,
            tensors=copies,
            peft_helper=helper,
            device="cpu",
            dtype=dtype,
        )
        return model, helper


def _facts(heard: Listening, scheduler: RecordingScheduler) -> dict[str, Any]:
    """What was really used, as plain data.

    Raises:
        PipelineError: prompts were encoded another number of times than for one or two branches, or
            the guidance changed between steps.
    """
    if len(heard.branches) not in (1, 2):
        msg = f"the pipeline called encode_prompt {len(heard.branches)} times, not once or twice"
        raise PipelineError(msg)
    if len(heard.guidance) != 1:
        msg = f"the pipeline guided its steps with scales {sorted(heard.guidance)}, not with one"
        raise PipelineError(msg)
    (guidance,) = heard.guidance
    negative = set(heard.branches[1][0]) if len(heard.branches) == 2 else set()
    return {
        "sigmas": scheduler.rule.schedule.values(),
        "guidance_scale": guidance,
        "max_sequence_length": heard.max_sequence_length,
        "negative_prompts": sorted(negative),
        "kind": scheduler.rule.kind.value,
        "noise_level": scheduler.rule.noise_level,
    }


def __getattr__(name: str) -> type[Any]:
    """Make the recording class of a family when it is asked for by name (`RecordingNAME`)."""
    base = name.removeprefix(PREFIX)
    if base == name or base not in FAMILIES:
        raise AttributeError(name)
    family = FAMILIES[base]
    stock = getattr(import_module(family.pipeline_module), family.pipeline_class)
    made = type(name, (RecordingMixin, stock), {"family": family, "__module__": __name__})
    globals()[name] = made
    return made


def no_post_process(od_config: Any) -> Callable[[Any], Any]:
    """Return the engine's step after a pipeline: none, pictures were finished beside the model."""
    del od_config
    return lambda output: output


def register() -> None:
    """Make every family's recording class known to the engine, in this process."""
    for family in FAMILIES.values():
        register_diffusion_model(
            f"{PREFIX}{family.pipeline_class}",
            __name__,
            f"{PREFIX}{family.pipeline_class}",
            post_process_func_name=no_post_process.__name__,
        )
