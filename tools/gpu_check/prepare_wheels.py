"""Collects what a machine without a network lacks: `python tools/gpu_check/prepare_wheels.py wheels`.

Builds omni-core and omni-engine-fsdp, and downloads what they need, in the versions that are installed
here, for the other machine's Python; `--have` names what is there already. On that machine:

    python -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python tools/gpu_check/check.py --out results
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("omni-core", "omni-engine-fsdp")
THERE = ("torch", "numpy", "setuptools", "packaging", "typing-extensions")
"""A machine with an accelerator has these, in builds of its own."""


def needed(names: Iterable[str], have: Iterable[str]) -> dict[str, str]:
    """Find what *names* need, over and over: name -> the version that is installed here.

    Args:
        names: Distributions; they themselves are left out.
        have: Names to leave out, with whatever only they need.
    """
    there, roots = {_key(name) for name in have}, {_key(name) for name in names}
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        for requirement in metadata.requires(name) or ():
            wanted, _, marker = requirement.partition(";")
            match = re.match(r"[A-Za-z0-9._-]+", wanted.strip())
            if match is None or "extra" in marker or "sys_platform" in marker:
                continue
            key = _key(match.group())
            if key in there or key in found or key in roots:
                continue
            try:
                found[key] = metadata.version(key)
            except metadata.PackageNotFoundError:
                continue  # of another Python or platform than this one
            waiting.append(key)
    return dict(sorted(found.items()))


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def commands(
    out: Path, pins: Iterable[tuple[str, str]], *, python: str, platforms: Sequence[str]
) -> list[list[str]]:
    """List the pip commands that fill *out*."""
    pip = [sys.executable, "-m", "pip"]
    built = [str(ROOT / "packages" / name) for name in OURS]
    tags = [f"--platform={tag}" for tag in platforms]
    listed = [
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), *built]
    ]
    pinned = [f"{name}=={version}" for name, version in pins]
    if pinned:
        only = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", *tags]
        listed.append([*pip, "download", "--quiet", *only, "-d", str(out), *pinned])
    return listed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="version on the other machine")
    parser.add_argument(
        "--platform", nargs="*", default=["manylinux_2_28_x86_64", "manylinux2014_x86_64"]
    )
    parser.add_argument("--have", nargs="*", default=[], help="packages that are there already")
    parser.add_argument("--list", action="store_true", help="only say what would be collected")
    options = parser.parse_args(arguments)
    pins = needed(OURS, [*THERE, *options.have])
    if options.list:
        print("\n".join(f"{name}=={version}" for name, version in pins.items()))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for command in commands(
        options.out, pins.items(), python=options.python, platforms=options.platform
    ):
        subprocess.run(command, check=True)
    size = sum(wheel.stat().st_size for wheel in options.out.glob("*.whl"))
    print(f"{len(list(options.out.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
