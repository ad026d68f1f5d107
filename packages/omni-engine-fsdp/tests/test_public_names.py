from __future__ import annotations

import subprocess
import sys

import pytest

import omni_engine_fsdp

NAMES = [
    "DiffusersFSDPEngine",
    "EngineRollout",
    "EngineRolloutConfig",
    "FSDPDiffusionActorConfig",
    "FSDPEngineConfig",
    "ForwardDiffusersFSDPEngine",
    "LoRAAdapterMixin",
    "PPODiffusersFSDPEngine",
    "RolloutPlacement",
    "SD3Family",
    "ShardBase",
    "ShardTrained",
    "__version__",
]


def test_the_public_names_are_frozen() -> None:
    assert sorted(omni_engine_fsdp.__all__) == NAMES
    for name in NAMES:
        assert getattr(omni_engine_fsdp, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        _ = omni_engine_fsdp.Missing


def test_naming_plugins_and_options_imports_no_torch() -> None:
    code = (
        "import sys; import omni_engine_fsdp.plugins, omni_engine_fsdp.options; "
        "print([n for n in ('torch', 'diffusers', 'peft', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
