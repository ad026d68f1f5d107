"""What families of a pipeline folder share: its parts are read when asked for, its scheduler says the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

import diffusers
import torch
import transformers

from omni_core.model import Denoiser, ModelFamily
from omni_core.prompt_length import PromptLength
from omni_core.schedule import NUM_TRAIN_TIMESTEPS, FlowMatchSchedule
from omni_engine_fsdp.families.folder import PipelineFolder, quiet_loading
from omni_engine_fsdp.families.image_codec import autoencoder_scale
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import TransformerDenoiser

C = TypeVar("C", bound=StockConditioner)

EULER = "FlowMatchEulerDiscreteScheduler"


class FolderFamily(ModelFamily):
    """A family derives from it and writes `load_conditioner` and `load_codec` over `folder`."""

    name: ClassVar[str]
    """As in `model.family`."""
    transformer_class: ClassVar[Any]
    """Of the component `transformer`."""
    denoiser_class: ClassVar[type[TransformerDenoiser]]
    """What is made of it; a family that checks it first writes `load_denoiser` itself."""

    @cached_property
    def folder(self) -> PipelineFolder:
        """The folder at `model.path`, checked to be of this family."""
        folder = PipelineFolder.open(self.config.path)
        folder.expect(self.name, self.pipeline_classes)
        return folder

    @property
    def compute_dtype(self) -> torch.dtype:
        """`model.dtype`: what the transformer computes in, whatever its weights are kept in."""
        found: torch.dtype = getattr(torch, self.config.dtype.value)
        return found

    @cached_property
    def transformer_config(self) -> Mapping[str, Any]:
        """Of the transformer, without its weights."""
        config: Mapping[str, Any] = self.transformer_skeleton.config
        return config

    @cached_property
    def transformer_skeleton(self) -> Any:
        """The transformer on the meta device."""
        return self.folder.skeleton("transformer", self.transformer_class)

    def load_transformer(self, dtype: torch.dtype) -> Any:
        """Read the transformer's weights."""
        return self.folder.load("transformer", self.transformer_class, dtype=dtype)

    def load_denoiser(self, dtype: torch.dtype) -> Denoiser:
        """Read the transformer; its weights are kept in *dtype* and it computes in `model.dtype`."""
        return self.denoiser_class(self.load_transformer(dtype), self.compute_dtype)

    def autoencoder_scale(self, vae_class: Any) -> int:
        """Pixels on a side of one latent of the component `vae`, which is not loaded."""
        return autoencoder_scale(self.folder.skeleton("vae", vae_class))

    def load_text_pipeline(self, pipeline_class: Any, *, dtype: torch.dtype, **absent: Any) -> Any:
        """Read the stock pipeline with its tokenizers and text encoders alone.

        Args:
            pipeline_class: Of diffusers.
            dtype: Of the encoders.
            absent: Components that take the place of stored ones; most of them None.
        """
        with quiet_loading():
            return pipeline_class.from_pretrained(
                self.folder.root,
                **{"transformer": None, "vae": None, **absent},
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
            )

    def conditioner_of(
        self, kind: type[C], pipeline_class: Any, dtype: torch.dtype, *, most: int, **absent: Any
    ) -> C:
        """Read tokenizers and encoders, for a conditioner over the stock pipeline.

        Args:
            kind: Of the conditioner.
            pipeline_class: Of diffusers.
            dtype: Of the encoders.
            most: Tokens that the pipeline takes.
            absent: As for `load_text_pipeline`.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than that.
        """
        length = self.check_text_length(most)
        pipeline = self.load_text_pipeline(pipeline_class, dtype=dtype, **absent)
        return kind(pipeline, max_sequence_length=length)

    def count_tokens(
        self, tokenizer: str, prompts: Sequence[str], *, limit: int | None = None
    ) -> list[PromptLength]:
        """Count tokens, special ones included, as a component of the folder does.

        Args:
            tokenizer: Name of the component.
            prompts: As the encoder is given them.
            limit: Tokens that are read; None takes the tokenizer's own number.
        """
        counter = self.tokenizer(tokenizer)
        rows = counter(list(prompts), verbose=False)["input_ids"]
        most = limit or int(counter.model_max_length)
        return [PromptLength(tokens=len(row), limit=most) for row in rows]

    def chat_texts(self, prompts: Sequence[str], *, enable_thinking: bool) -> list[str]:
        """Return prompts as the stock pipelines of chat models write them: one turn of a user."""
        chat = self.tokenizer("tokenizer")
        return [
            chat.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=enable_thinking,
            )
            for prompt in prompts
        ]

    @cache  # noqa: B019 -- a family lives as long as its run
    def tokenizer(self, component: str) -> Any:
        """Read a tokenizer of the folder, once."""
        _, class_name = self.folder.components[component]
        return getattr(transformers, class_name).from_pretrained(
            self.folder.root, subfolder=component, local_files_only=True
        )

    def check_text_length(self, most: int) -> int:
        """Return `model.pipeline.max_sequence_length`.

        Raises:
            ValueError: it is more than the stock pipeline takes.
        """
        length = self.config.pipeline.max_sequence_length
        if length > most:
            raise ValueError(
                f"model.pipeline.max_sequence_length {length}: {self.pipeline_classes[0]} takes at "
                f"most {most}"
            )
        return length

    def scheduler(self, *class_names: str) -> Any:
        """Read the pipeline's own scheduler.

        Args:
            class_names: That the family works with; none means the flow-matching Euler scheduler.

        Raises:
            ValueError: it is of another class, or counts other timesteps than 0 to 1000.
        """
        _, found = self.folder.components.get("scheduler", (None, None))
        wanted = class_names or (EULER,)
        self.folder.require("scheduler", found if found in wanted else " or ".join(wanted))
        stock = getattr(diffusers, str(found)).from_pretrained(
            self.folder.root, subfolder="scheduler", local_files_only=True
        )
        if stock.config.num_train_timesteps != NUM_TRAIN_TIMESTEPS:
            raise ValueError(
                f"{self.folder.root / 'scheduler'}: num_train_timesteps must be "
                f"{NUM_TRAIN_TIMESTEPS}, got {stock.config.num_train_timesteps}"
            )
        return stock


def sigmas_of(scheduler: Any, **arguments: Any) -> FlowMatchSchedule:
    """Return the schedule that a stock scheduler makes of what its pipeline calls `set_timesteps` with."""
    scheduler.set_timesteps(**arguments)
    return FlowMatchSchedule(scheduler.sigmas)


def shift_keywords(
    config: Mapping[str, Any], shift: Any, tokens: int, most: float
) -> dict[str, Any]:
    """Return the shift by size that a stock pipeline computes from its scheduler's config.

    Args:
        config: Of the scheduler.
        shift: The pipeline module's own `calculate_shift`.
        tokens: Of the transformer's image sequence.
        most: The module's default of `max_shift`.
    """
    mu = shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", most),
    )
    return {"mu": mu}
