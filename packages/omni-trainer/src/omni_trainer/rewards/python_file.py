"""A reward that is a function in a file: `score(images, prompts, metadata)` -> one number an image.

- images: B `PIL.Image.Image` of mode RGB; of videos, B lists of them, the frames;
- prompts: B texts;
- metadata: B dicts, the other columns of each prompt's row, its `target` where it has one, and
  `input_image`, a `PIL.Image.Image`, where it edits one; with videos their `frame_rate`, and with sound
  `audio`, a float32 array [channels, samples] in -1 to 1, and its `audio_rate`.

It returns B numbers in the order of the images. `None` or a number that is not finite in place of one
says that this picture has no score, which is a failure (`reward.on_error`), never a zero. A wrong count
is an error, and so is whatever the function raises. Each process that scores reads the file for itself.
"""

from __future__ import annotations

import importlib.util
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from omni_core import plugins, resources
from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.options import PythonRewardConfig
from omni_trainer.rewards.pictures import Shown, input_images, shown_of
from omni_trainer.targets import RULES

Function = Callable[[list[Shown], list[str], list[dict[str, Any]]], Iterable[Any]]
PARAMETERS = "(images, prompts, metadata)"


class RewardFileError(ValueError):
    """A file does not hold the function that a config names; says what it holds."""


class PythonReward(RewardFunction):
    """Its file is looked at when it is made, and run by `setup`."""

    def __init__(self, options: PythonRewardConfig) -> None:
        """Check that the file defines the function, without running it.

        Raises:
            FileNotFoundError: no such file.
            RewardFileError: it is no Python, or defines no such function.
        """
        self.options = options
        self.path = resources.resolve(options.path).absolute()
        self.name = f"{self.path.name}:{options.function}"
        self._rule = None if options.target_rule is None else RULES[options.target_rule]
        self._function: Function | None = None
        _check_defines(self.path, options.function)

    def setup(self) -> None:
        """Run the file.

        Raises:
            RewardFileError: the name is no function, or one that takes other arguments.
        """
        module = _import(self.path)
        function = getattr(module, self.options.function, None)
        if not callable(function):
            msg = f"{self.name} is {function!r}; a function {PARAMETERS} is expected"
            raise RewardFileError(msg)
        signature = inspect.signature(function)
        try:
            signature.bind([], [], [])
        except TypeError:
            msg = f"{self.name} takes {signature}; {PARAMETERS} is expected"
            raise RewardFileError(msg) from None
        self._function = function

    def target(self, prompt: str) -> str | None:
        """Return the target by `target_rule`; None without one.

        Raises:
            ValueError: the prompt has no target by the rule.
        """
        return None if self._rule is None else self._rule(prompt)

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Call the function with all of the batch.

        Raises:
            ValueError: there are no images and no videos, or not one for each input.
            TypeError: it returned something else than numbers; names file and function.
            RuntimeError: `setup` was not called.
        """
        if self._function is None:
            msg = f"PythonReward.setup was not called ({self.name})"
            raise RuntimeError(msg)
        pictures = shown_of(media, inputs, self.name)
        prompts = [row.prompt for row in inputs]
        edited = input_images(inputs)
        metadata = [
            {**_metadata(row, image), **_heard(media, place)}
            for place, (row, image) in enumerate(zip(inputs, edited, strict=True))
        ]
        returned: Any = self._function(pictures, prompts, metadata)
        return [self._result(value) for value in self._values(returned)]

    def close(self) -> None:
        """Forget the function."""
        self._function = None

    def _values(self, returned: Any) -> list[Any]:
        if returned is None:
            msg = f"{self.name} returned None; a list of numbers is expected (is there a `return`?)"
            raise TypeError(msg)
        if isinstance(returned, str | bytes | dict) or not isinstance(returned, Iterable):
            kind = type(returned).__name__
            msg = f"{self.name} returned a {kind}; a list with a number for each image is expected"
            raise TypeError(msg)
        return list(returned)

    def _result(self, value: Any) -> RewardResult:
        if value is None:
            return RewardResult.failed(f"{self.name} returned None for this image")
        return RewardResult(value=value)


def _metadata(row: RewardInput, image: Image.Image | None) -> dict[str, Any]:
    known = {"target": row.target, "input_image": image}
    return {**row.metadata, **{name: each for name, each in known.items() if each is not None}}


def _heard(media: Media, row: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if media.video is not None:
        found["frame_rate"] = media.frame_rate
    if media.audio is not None:
        found |= {"audio": media.audio[row].cpu().numpy(), "audio_rate": media.audio_rate}
    return found


def _check_defines(path: Path, function: str) -> None:
    if path.suffix != ".py":
        msg = f"{path} is no Python file: its name does not end in .py"
        raise RewardFileError(msg)
    try:
        table = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except SyntaxError as exc:
        msg = f"{path}:{exc.lineno}: {exc.msg}"
        raise RewardFileError(msg) from None
    except (UnicodeDecodeError, IsADirectoryError) as exc:
        msg = f"{path} is no Python file: {exc}"
        raise RewardFileError(msg) from None
    symbols = table.get_symbols()
    if any(
        one.get_name() == function and (one.is_assigned() or one.is_imported()) for one in symbols
    ):
        return
    functions = [one.get_name() for one in symbols if one.is_namespace()]
    close = plugins.nearest(function, functions)
    msg = (
        f"{path} defines no {function!r}{f'; did you mean {close!r}?' if close else ''} "
        f"(it defines {', '.join(functions) or 'nothing'}; reward.function names another)"
    )
    raise RewardFileError(msg)


def _import(path: Path) -> ModuleType:
    """Run the file as a module of a name that no other has; its folder's modules can be imported."""
    name = f"omni_reward_file_{sha256(str(path).encode()).hexdigest()[:16]}"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
