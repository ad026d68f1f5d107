"""`omni doctor`: is this machine ready? Each check says what it found and, if it is not well, what to do."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

import attrs
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.text import Text

from omni_trainer.commands.catalogue import offers
from omni_trainer.commands.terminal import print_table

TESTED = {
    "torch": "==2.13.0",
    "diffusers": "==0.40.0",
    "accelerate": "==1.12.0",
    "transformers": "<5.15",
}
"""Versions that the test suite runs with; others within the metadata's ranges may work as well."""
PINNED = {"vllm-omni": "==0.30.*", "vllm": "==0.30.*"}
"""What the rollout `vllm_omni` was written for; not needed by others."""
GIB = 2**30
LOW_DISK, LOW_SHARED = 5 * GIB, 1 * GIB
CONNECT_TIMEOUT = 2.0
"""Seconds."""


class Health(enum.StrEnum):
    """What a check came to."""

    OK = "ok"
    NOTE = "note"
    """Works, but differs from what is tested, or something optional is missing."""
    BROKEN = "broken"


_STYLE = {Health.OK: "green", Health.NOTE: "yellow", Health.BROKEN: "bold red"}


@attrs.frozen
class Finding:
    """One line of the report."""

    subject: str
    health: Health
    said: str


def run() -> int:
    """Print all findings; 1 if anything is broken."""
    found = [finding for check in CHECKS for finding in check()]
    rows = [(f.subject, Text(f.health.value, _STYLE[f.health]), f.said) for f in found]
    print_table(["what", "health", "found"], rows)
    return 1 if any(f.health is Health.BROKEN for f in found) else 0


# -- packages -------------------------------------------------------------------------------------


def ours() -> list[metadata.Distribution]:
    """Every installed distribution that is omni-core or depends on it."""
    found = {
        dist.name: dist
        for dist in metadata.distributions()
        if "omni-core" in (dist.name, *(Requirement(text).name for text in dist.requires or ()))
    }
    return [found[name] for name in sorted(found)]


def check_requirements() -> Iterator[Finding]:
    """Installed versions against what each of our packages requires."""
    for dist in ours():
        wrong = [line for text in dist.requires or () if (line := _unmet(Requirement(text)))]
        health = Health.BROKEN if wrong else Health.OK
        yield Finding(dist.name, health, "; ".join(wrong) or dist.version)


def _unmet(requirement: Requirement) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    version = _version(requirement.name)
    if version is None:
        return f"needs {requirement}, which is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"needs {requirement}, found {version}"
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_tested_versions() -> Iterator[Finding]:
    """Versions of the large dependencies against those that are tested."""
    for name, tested in {**TESTED, **PINNED}.items():
        version = _version(name)
        if version is None and name in TESTED:
            yield Finding(name, Health.NOTE, f"not installed (tested: {tested.lstrip('=')})")
        elif version is not None and not SpecifierSet(tested).contains(version, prereleases=True):
            said = f"{version}, while {tested.lstrip('=')} is tested"
            yield Finding(name, Health.NOTE, said)
        elif version is not None:
            yield Finding(name, Health.OK, version)


def check_editable_metadata() -> Iterator[Finding]:
    """Editable installs keep the metadata of the day they were made: compare it with the source."""
    for dist in ours():
        source = editable_source(dist)
        if source is None or not (source / "pyproject.toml").is_file():
            continue
        stale = stale_metadata(dist, source)
        if stale:
            said = f"{'; '.join(stale)}: run `hatch run refresh` (or pip install -e again)"
            yield Finding(f"{dist.name} metadata", Health.BROKEN, said)


def editable_source(dist: metadata.Distribution) -> Path | None:
    """Return the directory that an editable install points to."""
    text = dist.read_text("direct_url.json")
    if not text:
        return None
    said = json.loads(text)
    if not said.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(said["url"]).path))


def stale_metadata(dist: metadata.Distribution, source: Path) -> list[str]:
    """Name what the installed metadata of *dist* says otherwise than the tree at *source*."""
    table = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    stale = []
    version = _source_version(table, source)
    if version is not None and version != dist.version:
        stale.append(f"installed as {dist.version}, the source is {version}")
    project = table.get("project", {})
    wanted = {
        (group, name, value)
        for group, points in project.get("entry-points", {}).items()
        for name, value in points.items()
    }
    wanted |= {("console_scripts", *item) for item in project.get("scripts", {}).items()}
    installed = {(point.group, point.name, point.value) for point in dist.entry_points}
    for said, points in (("lacks", wanted - installed), ("still has", installed - wanted)):
        if points:
            names = ", ".join(sorted(f"{group}:{name}" for group, name, _ in points))
            stale.append(f"the installed metadata {said} {names}")
    return stale


def _source_version(table: dict[str, object], source: Path) -> str | None:
    """Read a version from pyproject.toml, or from the file that hatch takes it from."""
    project = table.get("project")
    if isinstance(project, dict) and "version" in project:
        return str(project["version"])
    place: object = table
    for key in ("tool", "hatch", "version", "path"):
        place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, str) or not (source / place).is_file():
        return None
    _, _, text = (source / place).read_text(encoding="utf-8").partition("__version__ = ")
    return text.strip().strip("\"'") or None


def check_plugins() -> Iterator[Finding]:
    """Every offered plugin can be read."""
    found = list(offers())
    for offer in found:
        if offer.plugin is None:
            said = f"of {offer.distribution}: {offer.error}"
            yield Finding(f"{offer.group}:{offer.name}", Health.BROKEN, said)
    usable = sum(offer.plugin is not None for offer in found)
    yield Finding("plugins", Health.OK if usable else Health.BROKEN, f"{usable} can be used")


# -- machine --------------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    """Python itself."""
    said = f"{sys.version.split()[0]} at {sys.executable}"
    yield Finding("python", Health.OK if sys.version_info >= (3, 11) else Health.BROKEN, said)


def check_devices() -> Iterator[Finding]:
    """Devices that a run could use, and the threads of one process."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("devices", Health.BROKEN, "torch is not installed")
        return
    import torch

    from omni_core import device

    counted = [_counted(kind) for kind in device.available()]
    yield Finding("devices", Health.OK, ", ".join(counted))
    variable = os.environ.get("OMP_NUM_THREADS")
    said = f"{torch.get_num_threads()} a process, OMP_NUM_THREADS={variable or 'not set'}"
    yield Finding("threads", Health.OK, said)


def _counted(kind: str) -> str:
    from omni_core import device

    memory = device.total_memory(kind) if device.is_accelerator(kind) else 0
    return f"{device.count(kind)} x {kind}" + (f" of {memory / GIB:.0f} GiB" if memory else "")


def check_space() -> Iterator[Finding]:
    """Room where runs are written, and in the shared memory that Ray's object store lives in."""
    places = [("disk", Path.cwd(), LOW_DISK), ("shared memory", Path("/dev/shm"), LOW_SHARED)]
    for subject, place, low in places:
        if not place.is_dir():
            yield Finding(subject, Health.NOTE, f"{place} is not there")
            continue
        free = shutil.disk_usage(place).free
        said = f"{free / GIB:.1f} GiB free at {place}"
        if free < low:
            yield Finding(subject, Health.NOTE, f"{said}; {low / GIB:.0f} GiB are advised")
        else:
            yield Finding(subject, Health.OK, said)


def check_ports() -> Iterator[Finding]:
    """Ranks, scorers and engines find each other through ports of the loopback interface."""
    try:
        with socket.socket() as server:
            server.settimeout(CONNECT_TIMEOUT)
            server.bind(("127.0.0.1", 0))
            server.listen()
            address = "{}:{}".format(*server.getsockname())
            answers = reachable(address)
    except OSError as exc:
        advice = "a container or firewall forbids them: runs need trainer.backend=local"
        yield Finding("ports", Health.BROKEN, f"none can be opened on 127.0.0.1 ({exc}): {advice}")
        return
    if answers:
        yield Finding("ports", Health.OK, "opened and reached on 127.0.0.1")
    else:
        said = f"{address} was opened and cannot be reached: look for a firewall or a proxy"
        yield Finding("ports", Health.BROKEN, said)


# -- services -------------------------------------------------------------------------------------


def check_ray() -> Iterator[Finding]:
    """Ray, and the cluster that RAY_ADDRESS names."""
    version = _version("ray")
    if version is None:
        said = "not installed: runs need trainer.backend=local; `pip install 'omni-trainer[ray]'`"
        yield Finding("ray", Health.NOTE, said)
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address or address == "auto":
        yield Finding("ray", Health.OK, f"{version}; a run starts Ray on this machine")
        return
    said = f"{version}; RAY_ADDRESS={address}"
    if reachable(address):
        yield Finding("ray", Health.OK, f"{said} answers")
    else:
        advice = "does not answer: start the cluster or unset the variable"
        yield Finding("ray", Health.BROKEN, f"{said} {advice}")


def reachable(address: str) -> bool:
    """Whether something listens at `host:port` (a scheme in front is ignored)."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not port.isdigit():
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT):
            return True
    except OSError:
        return False


def check_ocr() -> Iterator[Finding]:
    """What the OCR reward needs; its recognition model ships in the wheel of RapidOCR."""
    missing = [n for n in ("rapidocr", "onnxruntime", "rapidfuzz") if _version(n) is None]
    if missing:
        said = f"{', '.join(missing)} not installed: `pip install 'omni-trainer[ocr]'`"
        yield Finding("ocr reward", Health.NOTE, said)
        return
    yield Finding("ocr reward", Health.OK, f"rapidocr {_version('rapidocr')}")


def check_services() -> Iterator[Finding]:
    """Trackers that come as extras: named where they are installed."""
    for name, distributions in (("wandb", ("wandb",)), ("mlflow", ("mlflow-skinny", "mlflow"))):
        version = next(filter(None, map(_version, distributions)), None)
        if version is not None:
            yield Finding(f"tracker {name}", Health.OK, version)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_requirements,
    check_tested_versions,
    check_editable_metadata,
    check_plugins,
    check_devices,
    check_space,
    check_ports,
    check_ray,
    check_ocr,
    check_services,
)
