"""A pipeline's family is found by the class that its model_index.json names."""

from __future__ import annotations

from typing import cast

from omni_core import plugins
from omni_core.model import ModelFamily
from omni_core.options import DiffusionModelConfig
from omni_engine_fsdp.families.folder import PipelineFolder


def find_family(config: DiffusionModelConfig) -> ModelFamily:
    """Build the model family that a config names, or the one that serves its pipeline.

    Raises:
        PluginNotFoundError: `model.family` is unknown.
        FileNotFoundError: `model.path` is no pipeline directory.
        ValueError: no installed family, or more than one, serves the pipeline; lists them.
    """
    known = plugins.registry(plugins.MODELS)
    if config.family is not None:
        return cast(ModelFamily, known.get(config.family).build(config))
    wanted = PipelineFolder.open(config.path).pipeline_class
    served = {name: known.get(name).load().pipeline_classes for name in known.names()}
    fitting = [name for name, classes in served.items() if wanted in classes]
    if len(fitting) == 1:
        return cast(ModelFamily, known.get(fitting[0]).build(config))
    said = "; ".join(f"{name}: {', '.join(classes)}" for name, classes in served.items())
    problem = f"{len(fitting)} model families serve" if fitting else "no installed family serves"
    msg = f"model.path {config.path!r}: {problem} {wanted}; set model.family (installed: {said})"
    raise ValueError(msg)
