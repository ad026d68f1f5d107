"""Check that the packages work when installed, not only from a checkout.

In a fresh environment: the engine beside omni-core alone imports every plugin it offers and needs no
Ray; then each wheel holds every file that its source folder has, recipes and weights included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
ENGINE_ALONE = """
import importlib.util
from importlib.metadata import entry_points

import omni_core, omni_engine_fsdp
from omni_core.plugins import GROUPS

assert "site-packages" in omni_core.__file__, omni_core.__file__
assert importlib.util.find_spec("ray") is None, "ray is installed"
for group in GROUPS:
    for point in entry_points(group=group):
        print(f"{group}: {point.name} -> {point.load().load()}")
"""


def pip(python: Path, *arguments: str) -> None:
    """Install with the pip of the fresh environment."""
    command = [python, "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True)


def files(folder: Path) -> set[str]:
    """List what a package folder ships, compiled files aside."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts
    }


def main() -> int:
    """Install, import, compare."""
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    with tempfile.TemporaryDirectory(prefix="omni-install-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin/python"
        pip(
            python, TORCH, str(ROOT / "packages/omni-core"), str(ROOT / "packages/omni-engine-fsdp")
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, "-c", ENGINE_ALONE], check=True, cwd=folder, env=environment)
        pip(python, "--no-deps", *map(str, packages))
        site = next(Path(folder).glob("lib/python*/site-packages"))
        missing = []
        for package in packages:
            name = package.name.replace("-", "_")
            lost = files(package / "src" / name) - files(site / name)
            missing += [f"{package.name}: the wheel lacks {path}" for path in sorted(lost)]
    print("\n".join(missing) or f"{len(packages)} packages work when installed")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
