"""The repository describes itself in several files; they must agree."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from omni_core import plugins

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = {package.name for package in PACKAGES}
HATCH = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
SHARED_FOLDER = {"default", "bench", "docs", "types"}
MIB = 2**20

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def ours(package: Path) -> set[str]:
    return {Requirement(d).name for d in project(package)["dependencies"]} & NAMES


def import_name(package: Path) -> str:
    return package.name.replace("-", "_")


def static_version(package: Path) -> str:
    text = (package / "src" / import_name(package) / "_version.py").read_text()
    found = re.fullmatch(r'__version__ = "(\d+\.\d+\.\d+)"\n', text)
    assert found, f"{package.name}: _version.py holds one literal version, nothing else"
    return found[1]


def members(environment: str) -> set[str]:
    template = HATCH[environment].get("template", "default")
    table = HATCH[environment].get("workspace") or HATCH[template]["workspace"]
    return {Path(m["path"] if isinstance(m, dict) else m).name for m in table["members"]}


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def run_checker(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools/check_boundaries.py", root],
        capture_output=True,
        text=True,
        check=False,
    )


def test_there_are_five_packages():
    assert sorted(NAMES) == [
        "omni-configs",
        "omni-core",
        "omni-engine-fsdp",
        "omni-rollout-vllm",
        "omni-trainer",
    ]


def test_boundaries_hold():
    done = run_checker(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


def write_packages(root: Path, sources: dict[str, str]) -> None:
    for name, dependencies in {
        "omni-core": ["torch"],
        "omni-engine-fsdp": ["omni-core", "diffusers"],
        "omni-trainer": ["omni-core", "ray", "torch"],
    }.items():
        folder = root / "packages" / name
        (folder / "src" / name.replace("-", "_")).mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\ndependencies = {dependencies}\n'
            f'[project.entry-points."omni.x"]\ny = "{name.replace("-", "_")}.offer:y"\n'
        )
        (folder / "src" / name.replace("-", "_") / "__init__.py").write_text("")
    for where, text in sources.items():
        path = root / "packages" / where.partition("/")[0].replace("_", "-") / "src" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"omni_core/a.py": "import numpy"}, "does not declare numpy"),
        ({"omni_core/a.py": "def f():\n    import ray"}, "does not declare ray"),
        ({"omni_trainer/a.py": "import omni_engine_fsdp.b"}, "imports its sibling"),
        ({"omni_engine_fsdp/a.py": "from omni_core.b import _c"}, "is private to omni_core"),
        ({"omni_trainer/loop.py": "def f():\n    import ray"}, "is for omni_trainer.rpc alone"),
        (
            {
                "omni_trainer/rpc/actors.py": "import ray",
                "omni_trainer/workers.py": "from omni_trainer.rpc.actors import x",
            },
            "must load without ray",
        ),
        ({"omni_core/options.py": "import torch"}, "must stay light, but loads torch"),
        ({"omni_core/__init__.py": "if True:\n    import torch"}, "must stay light"),
        ({"omni_engine_fsdp/offer.py": "import diffusers"}, "must stay light"),
        (
            {
                "omni_engine_fsdp/offer.py": "from omni_core.a import B",
                "omni_core/a.py": "import torch",
            },
            "must stay light, but loads omni_core.a -> torch",
        ),
        ({"omni_core/a.py": 'x = "cuda:0"'}, "device name 'cuda:0'"),
        ({"omni_core/a.py": "import torch\nx = torch.cuda"}, "device name 'cuda'"),
    ],
)
def test_the_checker_finds(tmp_path, sources, said):
    write_packages(tmp_path, sources)

    done = run_checker(tmp_path)

    assert done.returncode == 1
    assert said in done.stdout


def test_the_checker_allows_what_loads_late(tmp_path):
    write_packages(
        tmp_path,
        {
            "omni_core/options.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    import torch\n"
            "def f():\n    import torch",
            "omni_core/device.py": 'x = "cuda"',
            "omni_trainer/cli.py": "def f():\n    from omni_trainer.rpc import actors",
            "omni_trainer/rpc/actors.py": "import ray",
        },
    )

    done = run_checker(tmp_path)

    assert (done.returncode, done.stdout) == (0, "boundaries hold\n")


@each_package
def test_each_package_has_its_own_environment(package):
    assert members(package.name.removeprefix("omni-")) == {package.name} | ours(package)


def test_the_default_environment_has_every_package():
    assert members("default") == NAMES


def test_only_the_shared_environments_share_a_folder():
    assert HATCH["default"]["path"] == ".venv"
    for name, env in HATCH.items():
        if name not in SHARED_FOLDER | {"default"}:
            assert "path" not in env
            if not env.get("detached") and not name.startswith("hatch-"):
                assert env.get("template", "default") not in SHARED_FOLDER, name


def test_every_package_is_refreshed_and_type_checked():
    for package in PACKAGES:
        assert f"-e {{root}}/packages/{package.name}" in HATCH["default"]["scripts"]["refresh"]
        assert f"{{root}}/packages/{package.name}/src" in HATCH["types"]["scripts"]["check"]


def test_ci_runs_every_environment_that_has_tests():
    steps = {tuple(line.split()) for line in (ROOT / ".ci/run").read_text().splitlines()}
    tested = {name for name, env in HATCH.items() if "test" in env.get("scripts", {})}

    assert {("pytest", name, "test") for name in tested} <= steps


@each_package
def test_only_core_is_depended_on_with_an_open_range(package):
    own = [Requirement(d) for d in project(package)["dependencies"]]
    local = {r.name: str(r.specifier) for r in own if r.name in NAMES}

    expected = {} if package.name == "omni-core" else {"omni-core": "<1,>=0.1"}
    assert local == expected
    assert [str(r) for r in own if "==" in str(r.specifier)] == []


@each_package
def test_python_and_the_licence_are_declared(package):
    table = project(package)

    assert table["requires-python"] == ">=3.11"
    assert table["license"] == "Apache-2.0"
    assert table["license-files"] == ["LICENSE"]


@each_package
def test_license_is_the_same_everywhere(package):
    text = (ROOT / "LICENSE").read_bytes()

    assert (package / "LICENSE").read_bytes() == text
    assert b"Apache License" in text
    assert len(text) > 10_000


@each_package
def test_versions_are_static_and_installed(package):
    assert project(package)["dynamic"] == ["version"]
    assert version(package.name) == static_version(package), "run `hatch run refresh`"


@each_package
def test_the_changelog_begins_with_the_current_version(package):
    headings = re.findall(r"^## (\S+)", (package / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] == static_version(package)


@each_package
def test_each_package_has_a_readme_tests_and_types(package):
    source = package / "src" / import_name(package)

    assert (package / "README.md").read_text().startswith(f"# {package.name}\n")
    assert (source / "py.typed").is_file()
    assert ast.get_docstring(ast.parse((source / "__init__.py").read_text()))
    assert list((package / "tests").rglob("test_*.py"))


@each_package
def test_importing_a_package_is_light(package):
    heavy = "('torch', 'ray', 'diffusers', 'transformers', 'vllm')"
    code = f"import sys, {import_name(package)}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_entry_point_names_a_plugin_of_this_contract():
    offered = [p for group in plugins.GROUPS for p in entry_points(group=group)]

    assert len(offered) >= 9
    for point in offered:
        plugin = point.load()
        assert isinstance(plugin, plugins.Plugin), point
        assert plugin.api == plugins.API


def test_nothing_committed_names_a_registry_host_or_a_folder_of_one_machine():
    hosts = ("pypi" + ".org", "python" + "hosted", "pytorch.org" + "/whl", "index" + "-url")
    folders = ("/ro" + "ot/", "/ho" + "me/", "/wo" + "rk/", "/op" + "t/", "/tmp" + "/dev")
    text = re.compile("|".join(re.escape(word) for word in hosts + folders))
    found = []
    for path in tracked():
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in text.findall(content)]

    assert found == []


def test_the_repository_stays_small_and_holds_no_pickles():
    files = tracked()
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in files}

    assert sum(sizes.values()) < 30 * MIB, sorted(sizes, key=sizes.__getitem__)[-5:]
    assert [p for p in sizes if p.endswith((".pt", ".pth", ".pkl", ".ckpt", ".pyc", ".bin"))] == []


def test_the_readme_begins_with_two_commands():
    readme = (ROOT / "README.md").read_text()

    assert "pip install hatch\nhatch run quickstart\n" in readme
