"""Paths in a config: a file on disk, or one that a package ships (`package:omni_configs/tiny_signs`)."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path

PREFIX = "package:"


def resolve(path: str, *, relative_to: Path | None = None) -> Path:
    """Turn a config's path into one on disk.

    Args:
        path: `package:MODULE/REST`, or a path; `~` is expanded.
        relative_to: Directory that a relative path starts from; None is the current one.

    Raises:
        FileNotFoundError: it is not there; names what was looked for and where.
    """
    if path.startswith(PREFIX):
        module, _, rest = path.removeprefix(PREFIX).partition("/")
        if not module or not _is_installed(module):
            package = module.replace("_", "-") or "?"
            msg = f"{path!r}: package {module!r} is not installed; `pip install {package}` may provide it"
            raise FileNotFoundError(msg)
        found = Path(str(resources.files(module))) / rest
    else:
        found = (relative_to or Path()) / Path(path).expanduser()
    if not found.exists():
        msg = f"{path!r} does not exist (looked for {found.absolute()})"
        raise FileNotFoundError(msg)
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is missing, or no name of a module
        return False
