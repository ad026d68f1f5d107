"""Fixtures of the engine's tests: a tiny pipeline on disk, made once a session."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def _load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The builders of tools/tiny_models.py."""
    return _load_tool("tiny_models")


@pytest.fixture(scope="session")
def tiny_sd3(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random StableDiffusion3Pipeline: at most 32 x 32 px, scheduler shift 3, float32."""
    path: Path = tiny_models.build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")
    return path
