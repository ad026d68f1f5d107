"""A pipeline in the standard diffusers folder layout, read from the local disk alone.

Weights are read from safetensors only, and no code that a folder brings along is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from omni_core.resources import resolve

INDEX = "model_index.json"


@attrs.frozen(kw_only=True)
class PipelineFolder:
    """A directory with a model_index.json and a subfolder for each component."""

    root: Path
    pipeline_class: str
    """`_class_name` of the index: the diffusers pipeline that the folder was saved from."""
    components: dict[str, tuple[str, str]]
    """Component -> (library, class name); those that are absent (null) are left out."""
    settings: dict[str, Any] = attrs.field(factory=dict)
    """What else the index says of the pipeline, such as `is_distilled`."""

    @classmethod
    def open(cls, path: str) -> PipelineFolder:
        """Read the index of the pipeline at a config's path (see `omni_core.resources.resolve`).

        Raises:
            FileNotFoundError: no such directory, or no index in it.
            ValueError: the index is not one.
        """
        root = resolve(path)
        file = root / INDEX
        if not file.is_file():
            raise FileNotFoundError(
                f"{path!r} holds no {INDEX}: a pipeline in the diffusers folder layout is expected "
                f"(looked in {root.absolute()})"
            )
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from error
        if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
            raise ValueError(f"{file}: has no _class_name, so it names no pipeline")
        components = {
            name: (value[0], value[1])
            for name, value in index.items()
            if isinstance(value, list) and len(value) == 2 and None not in value
        }
        settings = {
            name: value
            for name, value in index.items()
            if not isinstance(value, list) and not name.startswith("_")
        }
        return cls(
            root=root,
            pipeline_class=index["_class_name"],
            components=components,
            settings=settings,
        )

    def expect(self, family: str, pipeline_classes: Sequence[str]) -> None:
        """Check that a family serves this pipeline.

        Raises:
            ValueError: it does not; names the pipeline and what the family serves.
        """
        if self.pipeline_class not in pipeline_classes:
            raise ValueError(
                f"model family {family!r} serves {', '.join(pipeline_classes)}; "
                f"{self.root / INDEX} says {self.pipeline_class}"
            )

    def require(self, component: str, class_name: str) -> None:
        """Check that a component is there and of the class that a family works with.

        Raises:
            ValueError: the index lacks it, or names another class.
            FileNotFoundError: its subfolder is missing.
        """
        _, found = self.components.get(component, (None, None))
        if found != class_name:
            raise ValueError(
                f"{self.root / INDEX}: component {component!r} must be {class_name}, got {found}"
            )
        if not (self.root / component).is_dir():
            raise FileNotFoundError(
                f"component {component!r} of the pipeline is missing: no folder "
                f"{(self.root / component).absolute()}"
            )

    def load(self, component: str, cls: Any, *, dtype: torch.dtype) -> Any:
        """Read one component's weights.

        Raises:
            ValueError: as `require`.
            FileNotFoundError: as `require`.
            OSError: its files are not what the class expects; the message names them.
        """
        self.require(component, cls.__name__)
        with quiet_loading():
            return cls.from_pretrained(
                self.root,
                subfolder=component,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
            )

    def skeleton(self, component: str, cls: Any) -> Any:
        """Build a component without weights (on the meta device), for its config alone.

        Raises:
            ValueError: as `require`.
            FileNotFoundError: as `require`.
        """
        self.require(component, cls.__name__)
        config = cls.load_config(self.root, subfolder=component, local_files_only=True)
        with torch.device("meta"):
            return cls.from_config(config)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Read weights without the libraries' own progress bars: a run shows its own."""
    shown = [
        module
        for module in (diffusers_logging, transformers_logging)
        if module.is_progress_bar_enabled()
    ]
    for module in shown:
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module in shown:
            module.enable_progress_bar()
