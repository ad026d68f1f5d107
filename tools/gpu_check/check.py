"""What the engine does on one accelerator: `python tools/gpu_check/check.py --out DIRECTORY`.

For a machine that is lent for minutes, with no network and no Ray. Each section (measure.py) runs in a
process of its own, under its own time limit: one that fails, runs out of memory or of time is reported,
and the next goes on. Writes gpu_check.json after each section, and gpu_check.md (for docs/performance.md)
at the end. `--smoke` runs all of it on the CPU with a tiny model in this process: a test of the script, not
of the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import measure
import random_sd3
import torch
from measure import SECTIONS, Section
from random_sd3 import SD35_MEDIUM, SMOKE

from omni_core import device as devices

BUDGET = 340.0
"""Seconds for everything."""
LEAST = 20.0
"""A section is not started with less."""
COLUMNS = {
    "images_per_s": "images/s",
    "samples_per_s": "sampled/s",
    "pairs_per_s": "trained pairs/s",
    "loaded_gib": "loaded GiB",
    "peak_gib": "peak GiB",
    "compile_s": "compile s",
}
Run = Callable[[Section, float], dict[str, Any]]
"""Runs a section for so many seconds at most; says `error` where it failed."""
Results = dict[str, dict[str, Any]]
"""Section -> what was measured, or `error`."""


def versions() -> dict[str, str]:
    """What ran, on what."""
    device = devices.resolve()
    found = {"device": str(device), "python": platform.python_version()}
    name = getattr(getattr(torch, device.type), "get_device_name", None)
    if name is not None:
        found["accelerator"] = str(name())
    found["memory_gib"] = f"{devices.total_memory(device) / 2**30:.0f}"
    for package in ("torch", "diffusers", "transformers", "peft", "omni-core", "omni-engine-fsdp"):
        found[package] = metadata.version(package)
    return found


def in_own_process(folder: Path) -> Run:
    """Run sections in processes of their own."""

    def run(section: Section, limit: float) -> dict[str, Any]:
        command = [sys.executable, __file__, "--section", section.name, "--folder", str(folder)]
        return supervised(command, limit)

    return run


def supervised(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Run a command whose last line of output is JSON; late or failed, that is what is returned."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": _last_words(done.stderr) or f"ended with {done.returncode}"}
    try:
        found = json.loads(lines[-1])
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        return {"error": f"its last words are no result: {lines[-1][:200]}"}
    return found


def _last_words(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def in_this_process(folder: Path) -> Run:
    """Run tiny sections here; compiled without code generation."""

    def run(section: Section, limit: float) -> dict[str, Any]:
        del limit
        return one_section(section, folder, smoke=True)

    return run


def one_section(section: Section, folder: Path, *, smoke: bool) -> dict[str, Any]:
    """Measure a section; a refusal or a lack of memory is a result."""
    try:
        if smoke:
            return measure.run(section, SMOKE, folder, backend="eager")
        return measure.run(section, SD35_MEDIUM, folder)
    except (torch.OutOfMemoryError, ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {_last_words(str(error).partition(chr(10))[0])}"}


def check(
    sections: Sequence[Section], run: Run, *, budget: float, save: Callable[[Results], None]
) -> Results:
    """Run sections in turn, each within its limit and what is left of the budget; saved after each."""
    until = time.monotonic() + budget
    found: Results = {}
    for section in sections:
        left = until - time.monotonic()
        if left < LEAST:
            found[section.name] = {"error": f"not run: {max(left, 0):.0f} s were left"}
            continue
        start = time.perf_counter()
        result = run(section, min(section.limit, left))
        found[section.name] = {**result, "wall_s": time.perf_counter() - start}
        print(f"{section.name}: {json.dumps(found[section.name])}", file=sys.stderr, flush=True)
        save(found)
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each section, then the canary's numbers."""
    lines = [_row("options", *COLUMNS.values()), _row(*["---"] * (len(COLUMNS) + 1))]
    for name, result in found.items():
        if "error" in result:
            lines.append(_row(name, result["error"], *[""] * (len(COLUMNS) - 1)))
        else:
            lines.append(_row(name, *(f"{result[column]:.3g}" for column in COLUMNS)))
    lines += ["", _row("bf16 canary", "kind", "exact", "floor"), _row(*["---"] * 4)]
    for name, result in found.items():
        for kind, said in result.get("canary", {}).items():
            lines.append(_row(name, kind, f"{said['exact']:.2g}", f"{said['floor']:.2g}"))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="where results go")
    parser.add_argument("--only", nargs="*", choices=names, help="sections")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, in this process")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = {section.name: section for section in SECTIONS}
    if options.section:
        print(json.dumps(one_section(chosen[options.section], options.folder, smoke=False)))
        return 0
    found = measured([chosen[name] for name in options.only or names], options)
    return int(all("error" in result for result in found.values()))


def measured(sections: Sequence[Section], options: argparse.Namespace) -> Results:
    """Measure, and write both files."""
    size, start = SMOKE if options.smoke else SD35_MEDIUM, time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)

    def save(found: Results, **more: Any) -> None:
        seconds = time.perf_counter() - start
        said = {"size": size.name, **more, "seconds": seconds, "sections": found}
        (options.out / "gpu_check.json").write_text(json.dumps(said, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        folder = random_sd3.write(Path(scratch), size)
        run = in_this_process(folder) if options.smoke else in_own_process(folder)
        found = check(sections, run, budget=options.budget, save=save)
    ran = versions()  # last: it opens the device, which the sections have to themselves
    save(found, versions=ran)
    heading = f"{size.name}; " + ", ".join(f"{k} {v}" for k, v in ran.items())
    (options.out / "gpu_check.md").write_text(f"{heading}\n\n{table(found)}\n")
    print(f"{heading}\n\n{table(found)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
