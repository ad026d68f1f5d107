r"""The text a prompt asks to be written is what stands in its one pair of double quotes.

The rule, for straight (`"..."`) and curly (`“...”`) double quotes alike:

- The target is the part between the quotes, as it stands. A part that opens with one kind of quote
  closes with the same kind; the other kind, and single quotes, are ordinary characters inside it.
- A backslash before a straight quote (`\"`) makes it part of the text. Outside a quoted part it is
  an ordinary character too. Other backslashes are ordinary.
- A prompt with no quoted part, one that is never closed, one of nothing but spaces, or several has no
  target: it is refused, since a score against a guess would train towards the wrong thing silently.
  `first_quoted_text` takes the first of several, as Flow-GRPO's published code does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r'\\"|["“”]')
_CLOSES = {'"': '"', "“": "”"}


def quoted_parts(prompt: str) -> list[str]:
    """Return every quoted part of *prompt*, in order, with `\\"` read as a quote.

    Raises:
        ValueError: a quoted part is never closed, or a curly quote closes nothing.
    """
    parts: list[str] = []
    opened: re.Match[str] | None = None
    for token in _TOKEN.finditer(prompt):
        if opened is None:
            if token[0] in _CLOSES:
                opened = token
            elif token[0] == "”":
                msg = f"the quote {token[0]} at column {token.start() + 1} closes nothing"
                raise ValueError(msg)
        elif token[0] == _CLOSES[opened[0]]:
            parts.append(prompt[opened.end() : token.start()].replace('\\"', '"'))
            opened = None
    if opened is not None:
        msg = f"the quote {opened[0]} at column {opened.start() + 1} is never closed"
        raise ValueError(msg)
    return parts


def first_quoted_text(prompt: str) -> str:
    """Return the first quoted part.

    Raises:
        ValueError: there is none, or it is blank.
    """
    parts = quoted_parts(prompt)
    if not parts:
        msg = 'no text in double quotes; the prompt must say what is to be read, as in: a sign "Hello"'
        raise ValueError(msg)
    if not parts[0].strip():
        msg = "nothing stands between the double quotes"
        raise ValueError(msg)
    return parts[0]


def quoted_text(prompt: str) -> str:
    """Return the one quoted part.

    Raises:
        ValueError: there is none, it is blank, or there are several.
    """
    parts = quoted_parts(prompt)
    if len(parts) > 1:
        shown = ", ".join(f'"{part}"' for part in parts)
        msg = f"{len(parts)} quoted parts ({shown}), and one is expected"
        raise ValueError(msg)
    return first_quoted_text(prompt)


RULES: Mapping[str, Callable[[str], str]] = {
    "quoted": quoted_text,
    "first_quoted": first_quoted_text,
}
"""Name in a config (`reward.target_rule`) -> rule."""
