"""Check what each package imports, from the source alone: nothing has to be installed.

- A package imports the standard library, itself, and what its `[project]` table declares; of the
  siblings only omni_core, and no private name of it.
- omni_core imports no backend (`BACKENDS`), not even inside a function.
- `import PACKAGE`, options and config modules, and the modules that entry points name load nothing
  heavy (`HEAVY`): they are followed through every module that they import at module level.
- ray is imported under omni_trainer.rpc alone; the rest of omni_trainer loads without it.
- Device names stand in omni_core/device.py alone.

A module of more than `MANY_LINES` lines is named as a question, not as an error.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MANY_LINES = 400
CORE = "omni_core"
BACKENDS = {"diffusers", "peft", "ray", "transformers", "vllm", "vllm_omni"}
HEAVY = BACKENDS | {
    "accelerate",
    "datasets",
    "matplotlib",
    "onnxruntime",
    "rapidocr",
    "tensordict",
    "torch",
}
LIGHT_NAMES = {"config", "configs", "options", "plugin", "plugins"}
RAY_HOME = "omni_trainer.rpc"
DEVICE_HOME = "omni_core.device"
DEVICE = re.compile(r"(cuda|hpu|mps|npu|xpu)(:\d+)?")
IMPORT_NAMES = {"pillow": "PIL", "protobuf": "google", "pyyaml": "yaml"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name: where it stands, and whether importing the module runs it."""

    name: str
    line: int
    at_load: bool

    @property
    def top(self) -> str:
        """The distribution's import name."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file of a package."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: tuple[Import, ...]


@dataclass(frozen=True)
class Package:
    """One distribution: its import name, what it may import and its modules by dotted name."""

    name: str
    declared: frozenset[str]
    targets: frozenset[str]
    modules: dict[str, Module]


def import_name(requirement: str) -> str:
    """Turn `omni-core>=0.1` into `omni_core`."""
    dist = re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0].lower()
    return IMPORT_NAMES.get(dist, dist.replace("-", "_"))


def find_imports(nodes: Iterable[ast.AST], *, at_load: bool = True) -> Iterator[Import]:
    """Yield every absolute import below *nodes*; bodies of functions run later than the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, at_load)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from find_imports(node.body, at_load=False)
            yield from find_imports(node.orelse, at_load=at_load)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from find_imports(ast.iter_child_nodes(node), at_load=at_load and not later)


def read_module(path: Path, source: Path) -> Module:
    """Parse one file below the folder *source*."""
    text = path.read_text()
    tree = ast.parse(text)
    name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    return Module(name, path, tree, text.count("\n"), tuple(find_imports(tree.body)))


def read_package(folder: Path) -> Package:
    """Read the metadata and the source of one package."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    wanted = [*project["dependencies"], *(item for extra in extras for item in extra)]
    points = [t for group in project.get("entry-points", {}).values() for t in group.values()]
    points += project.get("scripts", {}).values()
    source = folder / "src"
    modules = [read_module(path, source) for path in sorted(source.rglob("*.py"))]
    return Package(
        name=import_name(project["name"]),
        declared=frozenset(import_name(item) for item in wanted),
        targets=frozenset(point.partition(":")[0] for point in points),
        modules={module.name: module for module in modules},
    )


def check_declared(package: Package, siblings: set[str]) -> Iterator[str]:
    """A package imports what it declares; of the siblings only omni_core's public names."""
    allowed = package.declared | sys.stdlib_module_names | {package.name}
    for module in package.modules.values():
        for item in module.imports:
            where = f"{module.path}:{item.line}"
            if item.top in siblings - {package.name, CORE}:
                yield f"{where}: {package.name} imports its sibling {item.name}; only {CORE} is shared"
            elif item.top not in allowed:
                yield f"{where}: {package.name} imports {item.name} but does not declare {item.top}"
            elif package.name == CORE and item.top in BACKENDS:
                yield f"{where}: {CORE} must not import {item.name}"
            elif item.top == CORE != package.name and any(
                part.startswith("_") for part in item.name.split(".")
            ):
                yield f"{where}: {item.name} is private to {CORE}"


def check_ray(package: Package) -> Iterator[str]:
    """Only the RPC imports ray."""
    for module in package.modules.values():
        if package.name == RAY_HOME.partition(".")[0] and not below(module.name, RAY_HOME):
            for item in module.imports:
                if item.top == "ray":
                    yield f"{module.path}:{item.line}: {item.name} is for {RAY_HOME} alone"


def check_devices(package: Package) -> Iterator[str]:
    """No device name outside omni_core/device.py."""
    for module in package.modules.values():
        if module.name == DEVICE_HOME:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = DEVICE.fullmatch(node.value)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
                found = DEVICE.fullmatch(node.attr)
            else:
                continue
            if found:
                yield f"{module.path}:{node.lineno}: device name {found[0]!r}; ask {DEVICE_HOME}"


def below(name: str, parent: str) -> bool:
    """Whether *name* is the module *parent* or one inside it."""
    return name == parent or name.startswith(f"{parent}.")


def loaded_by(item: Import, modules: dict[str, Module]) -> Iterator[str]:
    """Yield our modules that importing *item* runs: the longest that exists, and its parents."""
    parts = item.name.split(".")
    yield from (name for n in range(1, len(parts) + 1) if (name := ".".join(parts[:n])) in modules)


def path_to(start: str, unwanted: set[str], modules: dict[str, Module]) -> list[str] | None:
    """Find how loading *start* comes to load one of *unwanted*, as the chain of names."""
    parts = start.split(".")
    first = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    chains = {
        name: [start] if name == start else [start, name] for name in first if name in modules
    }
    waiting = list(chains)
    while waiting:
        name = waiting.pop(0)
        for item in modules[name].imports:
            if not item.at_load:
                continue
            if item.top in unwanted:
                return [*chains[name], item.name]
            for found in loaded_by(item, modules):
                if found not in chains:
                    chains[found] = [*chains[name], found]
                    waiting.append(found)
    return None


def check_light(package: Package, modules: dict[str, Module]) -> Iterator[str]:
    """What is imported to list plugins or to check a config loads nothing heavy."""
    for module in package.modules.values():
        light = module.name.rpartition(".")[2] in LIGHT_NAMES
        if light or module.name in package.targets | {package.name}:
            chain = path_to(module.name, HEAVY, modules)
            if chain:
                yield f"{module.path}: must stay light, but loads {' -> '.join(chain[1:])}"
        elif not below(module.name, RAY_HOME):
            chain = path_to(module.name, {"ray"}, modules)
            if chain and len(chain) > 2:  # a direct import of ray is reported by check_ray
                yield f"{module.path}: must load without ray, but loads {' -> '.join(chain[1:])}"


def check(root: Path) -> list[str]:
    """Return one line for each broken rule."""
    packages = [
        read_package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))
    ]
    siblings = {package.name for package in packages}
    modules = {name: module for package in packages for name, module in package.modules.items()}
    broken: list[str] = []
    for package in packages:
        broken += check_declared(package, siblings)
        broken += check_ray(package)
        broken += check_devices(package)
        broken += check_light(package, modules)
    for module in modules.values():
        if module.lines > MANY_LINES:
            print(
                f"note: {module.path.relative_to(root)} has {module.lines} lines: one module or two?"
            )
    return [line.replace(f"{root}/", "") for line in broken]


def main(argv: list[str]) -> int:
    """Report what is broken in the repository at argv[0] (this one, if not given)."""
    root = Path(argv[0]) if argv else Path(__file__).resolve().parents[1]
    broken = check(root)
    print("\n".join(broken) or "boundaries hold")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
