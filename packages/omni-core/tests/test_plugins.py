"""Plugins: found through real entry points, refused with sentences, imported only when built."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_core import plugins
from omni_core.plugins import (
    ALGORITHMS,
    ENGINES,
    GROUPS,
    MODELS,
    REWARDS,
    ROLLOUTS,
    EngineRegistry,
    Plugin,
    PluginError,
    PluginNotFoundError,
    Registry,
    registry,
)
from omni_core.recipe import NoOptions

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution of one module that offers entry points, as pip lays it out."""
    count = itertools.count()
    modules = []

    def run(dist: str, group: str, points: dict[str, str], source: str = "") -> None:
        folder = tmp_path / str(next(count))
        info = folder / f"{dist}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
        module = dist.replace("-", "_")
        (folder / f"{module}.py").write_text(source)
        modules.append(module)
        monkeypatch.syspath_prepend(folder)

    yield run
    for module in modules:
        sys.modules.pop(module, None)


OFFER = """
from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions
plugin = Plugin(api=1, options=NoOptions, target="no_such_backend:Reward")
old = Plugin(api=0, options=NoOptions, target="x:y")
wrong = "not a plugin"
"""


def plugin(target: str = "collections:OrderedDict", **changes: object) -> Plugin:
    return Plugin(api=1, options=NoOptions, target=target, **changes)  # type: ignore[arg-type]


# -- installed -------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_and_its_backend_is_imported_only_by_build(
    install: Install,
) -> None:
    install("a-reward", REWARDS, {"mine": "a_reward:plugin"}, OFFER)
    found = Registry(REWARDS)
    assert "mine" in found.names()
    assert "a_reward" not in sys.modules, "listing imports no plugin"
    assert found.get("mine").options is NoOptions
    assert found.get("mine") is found.get("mine")
    assert found.distribution("mine") == "a-reward"
    with pytest.raises(ModuleNotFoundError, match="no_such_backend"):
        found.get("mine").build()


def test_an_unknown_name_lists_what_is_installed_the_nearest_and_the_package(
    install: Install,
) -> None:
    install("some", REWARDS, {"brightness": "some:plugin", "sharpness": "some:plugin"}, OFFER)
    with pytest.raises(PluginNotFoundError) as error:
        Registry(REWARDS).get("brightnes")
    said = str(error.value)
    assert "no omni.rewards plugin named 'brightnes'" in said
    assert "brightness" in said
    assert "sharpness" in said
    assert "did you mean 'brightness'?" in said


def test_a_missing_built_in_names_the_package_that_provides_it() -> None:
    group = Registry(ROLLOUTS)
    group._entry_points = dict  # type: ignore[method-assign,assignment] # nothing is installed
    with pytest.raises(PluginNotFoundError, match="pip install omni-rollout-vllm"):
        group.get("vllm_omni")
    with pytest.raises(
        PluginNotFoundError, match="installed: none; `pip install omni-engine-fsdp`"
    ):
        group.get("anything")


def test_every_providers_entry_names_a_group_and_a_package_of_ours() -> None:
    assert {group for group, _ in plugins.PROVIDERS} <= set(GROUPS)
    assert set(plugins.GROUP_PROVIDERS) == set(GROUPS)


def test_two_packages_that_offer_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("first", REWARDS, {"same": "first:plugin"}, OFFER)
    install("second", REWARDS, {"same": "second:plugin"}, OFFER)
    with pytest.raises(PluginError) as error:
        Registry(REWARDS).get("same")
    assert "first (first:plugin)" in str(error.value)
    assert "second (second:plugin)" in str(error.value)


def test_an_older_contract_fails_with_a_sentence(install: Install) -> None:
    install("old-one", MODELS, {"old": "old_one:old"}, OFFER)
    with pytest.raises(PluginError, match=r"omni\.models:old was written for plugin contract 0"):
        Registry(MODELS).get("old")


def test_what_is_no_plugin_is_refused(install: Install) -> None:
    install("odd", MODELS, {"odd": "odd:wrong"}, OFFER)
    with pytest.raises(PluginError, match="points at str, not at an omni_core Plugin"):
        Registry(MODELS).get("odd")


@pytest.mark.parametrize("target", ["broken:plugin", "broken:nothing", "nowhere:plugin"])
def test_an_entry_point_that_cannot_be_imported_names_its_package(
    install: Install, target: str
) -> None:
    source = "import no_such_module" if target == "broken:plugin" else OFFER
    install("broken", MODELS, {"broken": target}, source)
    with pytest.raises(PluginError, match=rf"omni\.models:broken of broken \({target}\)"):
        Registry(MODELS).get("broken")


def test_the_algorithm_of_this_package_takes_the_same_road() -> None:
    found = registry(ALGORITHMS)
    assert found.distribution("flow_grpo") == "omni-core"
    assert found.get("flow_grpo").load().__name__ == "FlowGRPO"


# -- registered ------------------------------------------------------------------------------------


def test_register_serves_this_process_and_is_taken_back() -> None:
    found = Registry(REWARDS)
    found.register("mine", plugin())
    assert "mine" in found.names()
    assert found.distribution("mine") == "this process"
    assert found.registered() == {"mine": plugin()}
    assert found.get("mine").build(a=1) == {"a": 1}
    with pytest.raises(PluginError, match="already has a plugin named 'mine'"):
        found.register("mine", plugin())
    found.unregister("mine")
    with pytest.raises(PluginNotFoundError):
        found.get("mine")


def test_register_never_hides_an_installed_plugin(install: Install) -> None:
    install("a-reward", REWARDS, {"mine": "a_reward:plugin"}, OFFER)
    with pytest.raises(PluginError, match="choose another name"):
        Registry(REWARDS).register("mine", plugin())


def test_register_checks_the_contract_too() -> None:
    with pytest.raises(PluginError, match="plugin contract 7"):
        Registry(REWARDS).register("new", Plugin(api=7, options=NoOptions, target="a:b"))


@pytest.mark.parametrize("target", ["module", "module:", ":name", "module:na-me"])
def test_a_target_is_module_and_attribute(target: str) -> None:
    with pytest.raises(ValueError, match="target"):
        plugin(target)


def test_an_unknown_group_lists_the_groups() -> None:
    with pytest.raises(PluginNotFoundError, match=r"omni\.engines"):
        registry("omni.nothing")


# -- engines ---------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[None]:
    EngineRegistry.register("diffusion", "here", plugin("builtins:dict", devices=("cpu",)))
    yield
    registry(ENGINES).unregister("diffusion.here")


@pytest.mark.usefixtures("engine")
def test_an_engine_is_chosen_by_model_type_backend_and_device() -> None:
    assert EngineRegistry.get("diffusion", "here", "cpu").devices == ("cpu",)
    with pytest.raises(
        PluginNotFoundError, match=r"'diffusion\.here' runs on cpu, not on 'abacus'"
    ):
        EngineRegistry.get("diffusion", "here", "abacus")
    with pytest.raises(PluginNotFoundError, match=r"did you mean 'diffusion\.here'"):
        EngineRegistry.get("diffusion", "hero", "cpu")


def test_an_engine_is_built_from_its_four_configs() -> None:
    EngineRegistry.register("diffusion", "four", plugin("itertools:chain"))
    try:
        built = EngineRegistry.new(
            "diffusion",
            "four",
            "cpu",
            model_config=[1],
            engine_config=[2],
            optimizer_config=[3],
            checkpoint_config=[4],
        )
        assert list(built) == [1, 2, 3, 4]
    finally:
        registry(ENGINES).unregister("diffusion.four")
