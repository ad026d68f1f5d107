"""`omni config show | validate`: what a run would be, without starting anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from rich.text import Text

from omni_core import config
from omni_trainer.commands.terminal import print_table
from omni_trainer.config import load_run


def show(source: str, overrides: Sequence[str], *, as_yaml: bool) -> int:
    """Print every value of the resolved config with the layer that it came from."""
    loaded = load_run(source, overrides)
    values = config.unstructure(loaded.config)
    if as_yaml:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return 0
    rows = []
    for path, value in config.leaves(values):
        origin = config.source_of(path, loaded.resolved.sources)
        style = "dim" if origin == "default" else ""
        rows.append([Text(path, style), Text(origin, style), Text(_said(value), style)])
    print_table(["key", "from", "value"], rows)
    return 0


def _said(value: Any) -> str:
    """Write one leaf the way that an override takes it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def validate(source: str, overrides: Sequence[str]) -> int:
    """Load the config and say that it fits; mistakes are raised, all of them at once."""
    load_run(source, overrides)
    print(f"{source} is valid")
    return 0
