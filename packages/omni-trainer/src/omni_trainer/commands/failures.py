"""What a command says when it fails, and the exit code that goes with it."""

from __future__ import annotations

import sys
import traceback

from omni_core.config import ConfigError
from omni_core.plugins import PluginError, PluginNotFoundError

FAILED, USAGE = 1, 2


class UsageError(Exception):
    """The command cannot do what was asked; the message is a sentence for the user."""


_MISTAKES = (UsageError, ConfigError, PluginError, PluginNotFoundError, FileNotFoundError)


def report(error: Exception) -> int:
    """Write *error* to stderr and return the exit code.

    A user's mistake is told in sentences; anything else with its traceback.
    """
    if isinstance(error, ConfigError):
        count = len(error.mistakes)
        _say(f"the configuration has {count} mistake{'s' * (count != 1)}:")
        for line in error.mistakes:
            _say(f"  {line}")
        return USAGE
    if isinstance(error, _MISTAKES):
        _say(f"error: {_sentence(error)}")
        return USAGE
    traceback.print_exception(error)
    return FAILED


def _sentence(error: Exception) -> str:
    """Take an error's own words; an OSError of the system names its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 -- this is where a command's errors are written
