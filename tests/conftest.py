"""What several tests of the whole start from."""

from __future__ import annotations

import pytest

from tiny_models.sd3 import build_tiny_sd3


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory):
    """Directory of a tiny random StableDiffusion3Pipeline: at most 32 x 32 px."""
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")
