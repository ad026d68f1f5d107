"""What several tests of the whole start from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory):
    """Directory of a tiny random StableDiffusion3Pipeline: at most 32 x 32 px."""
    spec = importlib.util.spec_from_file_location("tiny_models_of_tests", TOOLS / "tiny_models.py")
    tools = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tools
    spec.loader.exec_module(tools)
    return tools.build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")
