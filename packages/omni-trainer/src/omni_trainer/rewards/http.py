"""A reward that a server computes: pictures go out as PNG or JPEG in JSON, numbers come back.

    POST url
    {"images": ["<base64>", ...], "format": "png", "prompts": ["...", ...],
     "targets": ["..." or null, ...], "metadata": [{...}, ...]}

    200 {"scores": [0.5, null, ...]}        or the list alone: one for each image, in order

Where samples are edits, `"input_images"` holds what each is an edit of, in the form of the others.
`null` or a number that is not finite says that this picture has no score. A time-out, a connection that
fails, 408, 429 and 5xx may pass and are tried again (`reward.retries`); any other answer, an empty list or
a wrong count among them, fails the batch at once. A failure is never a zero.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from omni_core.reward import RetryableRewardError, RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.options import HTTPRewardConfig
from omni_trainer.rewards.pictures import images_of, input_images, pillow_images
from omni_trainer.targets import RULES

if TYPE_CHECKING:
    import httpx

PASSING = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses that a server may give once and not again."""
SHOWN = 200
"""Characters of an answer that an error shows."""


class _AnswerError(Exception):
    """An answer without the scores that were asked for; trying again would not help."""


class HTTPReward(RewardFunction):
    """One request for each batch; made by one client, which keeps its connection."""

    def __init__(self, options: HTTPRewardConfig) -> None:
        self.options = options
        self.name = f"http {options.url}"
        self._rule = None if options.target_rule is None else RULES[options.target_rule]
        self._client: httpx.Client | None = None

    def setup(self) -> None:
        """Make the client; nothing is sent.

        Raises:
            ValueError: the variable that `token_variable` names is not set.
        """
        import httpx

        self._client = httpx.Client(
            timeout=self.options.timeout,
            headers=self._headers(),
            # A server of this machine is not reached through a proxy.
            trust_env=httpx.URL(self.options.url).host not in ("localhost", "127.0.0.1", "::1"),
        )

    def _headers(self) -> dict[str, str]:
        variable = self.options.token_variable
        if variable is None:
            return {}
        token = os.environ.get(variable)
        if not token:
            msg = f"reward.token_variable: {variable} is not set in the environment of the scorer"
            raise ValueError(msg)
        return {"Authorization": f"Bearer {token}"}

    def target(self, prompt: str) -> str | None:
        """Return the target by `target_rule`; None without one.

        Raises:
            ValueError: the prompt has no target by the rule.
        """
        return None if self._rule is None else self._rule(prompt)

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Ask the server.

        Raises:
            ValueError: there are no images, or not one for each input; or a column cannot be sent.
            RetryableRewardError: the server did not answer, or in a way that may pass.
            RuntimeError: `setup` was not called.
        """
        body = self._body(images_of(media, inputs, self.name), inputs)
        try:
            scores = self._scores(self._answer(body), len(inputs))
        except _AnswerError as exc:
            return [RewardResult.failed(f"reward {self.name!r}: {exc}") for _ in inputs]
        return [self._result(score) for score in scores]

    def _body(self, images: torch.Tensor, inputs: Sequence[RewardInput]) -> bytes:
        form = self.options.format.value
        pictures = [_encoded(picture, form) for picture in pillow_images(images)]
        try:
            return json.dumps(
                {
                    "images": pictures,
                    "format": form,
                    "prompts": [row.prompt for row in inputs],
                    "targets": [row.target for row in inputs],
                    "metadata": [dict(row.metadata) for row in inputs],
                    **self._edited(inputs),
                },
                allow_nan=False,
            ).encode()
        except (TypeError, ValueError) as exc:
            msg = f"reward {self.name!r}: a row's columns cannot be sent as JSON: {exc}"
            raise ValueError(msg) from exc

    def _edited(self, inputs: Sequence[RewardInput]) -> dict[str, list[str | None]]:
        if all(row.image is None for row in inputs):
            return {}
        form = self.options.format.value
        found = [None if one is None else _encoded(one, form) for one in input_images(inputs)]
        return {"input_images": found}

    def _answer(self, body: bytes) -> httpx.Response:
        import httpx

        if self._client is None:
            msg = f"HTTPReward.setup was not called ({self.name})"
            raise RuntimeError(msg)
        try:
            answer = self._client.post(
                self.options.url, content=body, headers={"Content-Type": "application/json"}
            )
        except httpx.TransportError as exc:
            msg = f"no answer: {type(exc).__name__}: {exc}"
            raise RetryableRewardError(msg) from exc
        if answer.status_code in PASSING:
            raise RetryableRewardError(_said(answer))
        if answer.status_code != 200:
            raise _AnswerError(_said(answer))
        return answer

    def _scores(self, answer: httpx.Response, expected: int) -> list[Any]:
        try:
            found: Any = answer.json()
        except ValueError:
            msg = f"the answer is not JSON: {answer.text[:SHOWN]!r}"
            raise _AnswerError(msg) from None
        scores = found.get("scores") if isinstance(found, dict) else found
        if not isinstance(scores, list):
            msg = f"the answer holds no list of scores: {answer.text[:SHOWN]!r}"
            raise _AnswerError(msg)
        if len(scores) != expected:
            msg = f"{len(scores)} scores came back for {expected} images"
            raise _AnswerError(msg)
        return scores

    def _result(self, score: Any) -> RewardResult:
        if isinstance(score, bool) or not isinstance(score, int | float):
            said = json.dumps(score)[:SHOWN]
            return RewardResult.failed(f"reward {self.name!r} returned {said} for this image")
        return RewardResult(value=float(score))

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _encoded(picture: Image.Image, form: str) -> str:
    file = io.BytesIO()
    # A JPEG of the best quality that Pillow recommends; PNG is exact.
    picture.save(file, format=form.upper(), **({"quality": 95} if form == "jpeg" else {}))
    return base64.b64encode(file.getvalue()).decode("ascii")


def _said(answer: httpx.Response) -> str:
    text = " ".join(answer.text.split())[:SHOWN]
    return f"the server answered {answer.status_code}{f': {text}' if text else ''}"
