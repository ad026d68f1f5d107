"""A stranger's wheel beside the five packages: found by name, and trained by `omni train`."""

import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import omni_fork_example
from omni_core import plugins

OMNI = Path(sys.executable).with_name("omni")


def omni(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OMNI, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork")
    done = omni("train", "fork_tiny", "trainer.name=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/run"


def test_it_is_installed_from_a_wheel_and_needs_core_alone():
    dist = metadata.distribution("omni-fork-example")
    ours = [text for text in dist.requires or () if text.startswith("omni-")]

    assert "site-packages" in omni_fork_example.__file__
    assert '"editable"' not in (dist.read_text("direct_url.json") or "")
    assert len(ours) == 1
    assert ours[0].startswith("omni-core")


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (plugins.ENGINES, "diffusion.fork_ddp"),
        (plugins.REWARDS, "fork_redness"),
        (plugins.ALGORITHMS, "fork_reinforce"),
        (plugins.RECIPES, "fork_tiny"),
    ],
)
def test_its_plugins_are_found_by_name(group, name):
    assert plugins.registry(group).distribution(name) == "omni-fork-example"
    assert plugins.registry(group).get(name).load().__module__.startswith("omni_fork_example.")


def test_listing_them_imports_no_torch():
    code = (
        "import sys; from omni_core import plugins\n"
        "for group in plugins.GROUPS:\n"
        "    for name in plugins.registry(group).names(): plugins.registry(group).get(name)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_trains_with_its_own_reward_and_algorithm(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]

    assert [line["step"] for line in steps] == [1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    # Redness lies within -1 and 1 and differs between pictures; log_prob is this algorithm's own.
    assert all(-1 < line["reward/mean"] < 1 and line["reward/std"] > 0 for line in steps)
    assert all("actor/log_prob" in line for line in steps)


def test_a_wrong_option_of_its_own_is_named(tmp_path):
    done = omni("config", "validate", "fork_tiny", "reward.wieght=2", cwd=tmp_path)

    assert done.returncode == 2
    assert "reward.wieght: unknown key; did you mean 'weight'?" in done.stderr


def test_its_own_rule_between_sections_is_kept(tmp_path):
    done = omni("config", "validate", "fork_tiny", "algorithm.updates_per_rollout=2", cwd=tmp_path)

    assert done.returncode == 2
    assert "fork_reinforce is on-policy: expected 1, got 2" in done.stderr
