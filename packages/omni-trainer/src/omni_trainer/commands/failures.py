"""What a command says when it fails, and the exit code that goes with it.

An error that is answered with its own words is known by name, so that knowing it imports nothing.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Mapping

import structlog

from omni_core.config import ConfigError

FAILED, USAGE = 1, 2


class UsageError(Exception):
    """The command cannot do what was asked; the message is a sentence for the user."""


SENTENCES: Mapping[str, int] = {
    "builtins.FileExistsError": USAGE,
    "builtins.FileNotFoundError": USAGE,
    "builtins.IsADirectoryError": USAGE,
    "builtins.NotADirectoryError": USAGE,
    "builtins.PermissionError": USAGE,
    "omni_core.device.DeviceError": USAGE,
    "omni_core.plugins.PluginError": USAGE,
    "omni_core.plugins.PluginNotFoundError": USAGE,
    "omni_trainer.commands.failures.UsageError": USAGE,
    "omni_trainer.data.rows.PromptFileError": USAGE,
    "omni_trainer.rewards.python_file.RewardFileError": USAGE,
    "omni_trainer.run_directory.RunDirectoryError": USAGE,
    "omni_trainer.run.RunMistakeError": USAGE,
    "omni_core.engine.CheckpointError": FAILED,
    "omni_trainer.canary.CanaryError": FAILED,
    "omni_trainer.group.WorkerError": FAILED,
    "omni_trainer.rpc.resources.ResourceError": FAILED,
    "omni_trainer.samples.UnscoredError": FAILED,
    "omni_trainer.stopping.NotSavedError": FAILED,
}
"""Errors whose message says all: class -> exit code. A worker's error carries its own traceback."""


_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def report(error: Exception) -> int:
    """Write *error* to stderr and return the exit code.

    A user's mistake and a failed worker are told in their own words, anything else with its traceback.
    """
    if isinstance(error, ConfigError):
        count = len(error.mistakes)
        _say(f"the configuration has {count} mistake{'s' * (count != 1)}:")
        for line in error.mistakes:
            _say(f"  {line}")
        return USAGE
    mistake: str | None = getattr(error, "mistake", None)
    if mistake is not None:
        structlog.get_logger().info("worker.refused", details=str(error))
        _say(f"error: {mistake}; `omni -v` shows the traceback")
        return USAGE
    for kind in type(error).__mro__:
        code = SENTENCES.get(f"{kind.__module__}.{kind.__qualname__}")
        if code is not None:
            _say(f"error: {_sentence(error)}")
            return code
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        _say(f"error: {_sentence(error)}")
        return FAILED
    traceback.print_exception(error)
    return FAILED


def _sentence(error: Exception) -> str:
    """Take an error's own words; an OSError of the system names its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
