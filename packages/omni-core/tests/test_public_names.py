"""The public API is a list: a name is added or taken away on purpose, in this file too.

The other half is what importing costs: nothing heavy before a name is used, and no backend ever.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import omni_core

SOURCE = Path(omni_core.__file__ or "").parent
BACKENDS = {"ray", "diffusers", "transformers", "peft", "vllm", "vllm_omni", "accelerate"}
HEAVY = BACKENDS | {"torch", "tensordict", "numpy", "pytest"}

LIGHT = (
    "omni_core",
    "omni_core.choices",
    "omni_core.config",
    "omni_core.input_image",
    "omni_core.options",
    "omni_core.plugins",
    "omni_core.recipe",
    "omni_core.resources",
    "omni_core.window",
    "omni_core.rollout_correction_options",
    *(
        f"omni_core.algorithms.{path.stem}"
        for path in sorted(SOURCE.glob("algorithms/*_options.py"))
    ),
    "omni_core.testing",
    "omni_core.testing.toys.options",
    "omni_core.testing.toys.plugins",
)
"""What a command line, a recipe or a plugin's options may import."""

PUBLIC = [
    "__version__",
    "AdapterOperations",
    "AdvantageStd",
    "Aggregation",
    "Algorithm",
    "AlgorithmConfig",
    "BaseEngine",
    "BaseRollout",
    "BatchOutput",
    "CheckpointConfig",
    "CheckpointError",
    "clipped_surrogate",
    "Codec",
    "Conditioner",
    "Conditioning",
    "ConfigError",
    "ConfiguredLoss",
    "Denoiser",
    "derive_seed",
    "EditConditioner",
    "diffusion_loss",
    "DiffusionActorConfig",
    "DiffusionLossConfig",
    "DiffusionModelConfig",
    "DiffusionPipelineConfig",
    "DiffusionRolloutAlgoConfig",
    "DiffusionRolloutConfig",
    "DiffusionSamplingConfig",
    "embeds_padding_2_no_padding",
    "EngineConfig",
    "EngineRegistry",
    "FlowMatchSchedule",
    "gae_advantages",
    "gaussian_kl",
    "group_advantages",
    "GroupAdvantages",
    "Guidance",
    "initial_noise",
    "InputImage",
    "KLForm",
    "LanguageLoss",
    "Latents",
    "LoRAConfig",
    "loss_denominator",
    "LossFunction",
    "LossInputs",
    "LossTerms",
    "Media",
    "ModelFacts",
    "ModelFamily",
    "Moments",
    "no_padding_2_padding",
    "NonFiniteGradientsError",
    "NoOptions",
    "OptimizerConfig",
    "OptimizerReport",
    "outcome_advantages",
    "OutcomeAdvantages",
    "Plugin",
    "PluginChoice",
    "PluginError",
    "PluginNotFoundError",
    "Policy",
    "PolicyForm",
    "ppo_loss",
    "PPOLossOptions",
    "Prediction",
    "PredictionGuidance",
    "Recipe",
    "Registry",
    "registry",
    "RetryableRewardError",
    "old_mean",
    "ReverseStep",
    "RewardConfig",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "RolloutHandle",
    "RolloutRequest",
    "RolloutState",
    "RolloutStateError",
    "RolloutTimeoutError",
    "RunFacts",
    "sample_seed",
    "SampleRecord",
    "SamplingSpec",
    "sft_loss",
    "Standing",
    "Step",
    "step_noise",
    "StepKind",
    "StepPrediction",
    "TextLayout",
    "Timesteps",
    "TokenAdvantages",
    "Tracker",
    "TrainBatch",
    "Trajectory",
    "transition_std",
    "UpdateReport",
    "value_loss",
    "ValueLossOptions",
    "ForwardLossInputs",
    "RolloutCorrectionOptions",
    "RolloutWeights",
    "adaptive_error",
    "clean_estimate",
    "denoising_error",
    "noise_to",
    "velocity_error",
    "velocity_kl",
    "weighted_reward_sum",
    "WeightMismatchError",
    "WeightUpdate",
]

SUITES = [
    "AlgorithmSuite",
    "EngineSuite",
    "ForwardEngineSuite",
    "OnRanks",
    "RewardSuite",
    "RolloutSuite",
    "forward_loss_inputs",
    "loss_inputs",
    "requests_for",
    "take_rows",
    "train_batch",
    "trained_leaf",
]


def test_the_public_names_are_these() -> None:
    assert sorted(omni_core.__all__) == sorted(PUBLIC)
    assert sorted(dir(omni_core)) == sorted(PUBLIC)


def test_each_name_is_there_and_is_documented() -> None:
    found = {name: getattr(omni_core, name) for name in PUBLIC}
    undocumented = [
        name
        for name, value in found.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert undocumented == []
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = omni_core.no_such_name


def test_no_public_name_is_hidden_by_a_module() -> None:
    # Importing omni_core.x makes x an attribute of the package, whatever __getattr__ would say.
    modules = {path.stem for path in SOURCE.glob("*.py")} | {"algorithms", "testing"}
    assert modules & set(PUBLIC) == set()


def test_the_suites_that_a_fork_proves_its_plugin_with_are_these() -> None:
    from omni_core import testing

    assert sorted(testing.__all__) == sorted(SUITES)
    for name in SUITES:
        assert getattr(testing, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'NoSuite'"):
        _ = testing.NoSuite


def loaded_by(code: str) -> set[str]:
    """Which heavy modules are loaded after running *code* in a process of its own."""
    code += f"\nimport sys; print(*sorted(sys.modules.keys() & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_heavy_is_loaded_to_list_plugins_or_check_a_config() -> None:
    blamed = [
        f"import {module}; print(*(sys.modules.keys() & heavy), {module!r})" for module in LIGHT
    ]
    code = "\n".join(["import sys", f"heavy = {HEAVY!r}", *blamed])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(LIGHT)


def test_a_config_of_this_package_is_checked_without_torch() -> None:
    code = (
        "from omni_core.config import structure\n"
        "from omni_core.plugins import ALGORITHMS, registry\n"
        "options = registry(ALGORITHMS).get('flow_grpo').options\n"
        "assert structure({'clip_ratio': 0.1}, options).clip == 0.1\n"
    )
    assert loaded_by(code) == set()


def test_no_backend_is_loaded_by_all_of_it() -> None:
    code = "import omni_core\nfor name in omni_core.__all__: getattr(omni_core, name)"
    assert loaded_by(code) & (BACKENDS | {"pytest"}) == set()


def test_no_module_imports_a_backend() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] in BACKENDS
    ]
    assert found == []


def test_only_the_suites_and_what_runs_them_on_ranks_import_pytest() -> None:
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if "pytest" in _imported(node)
    }
    suites = ("algorithm", "engine", "forward_engine", "reward", "rollout")
    assert users == {"testing/on_ranks.py", *(f"testing/{name}_suite.py" for name in suites)}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []
