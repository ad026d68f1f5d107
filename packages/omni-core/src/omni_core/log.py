"""structlog is set up once per process, by entry points only; library code just asks for a logger."""

from __future__ import annotations

import sys

import structlog


def configure(*, level: str = "info", json: bool | None = None, **bound: object) -> None:
    """Send events to stderr: readable on a terminal, JSON lines elsewhere.

    Args:
        level: The lowest level that is kept.
        json: None picks JSON unless stderr is a terminal.
        bound: Put on every event of this process, such as the rank.
    """
    if json is None:
        json = not sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks if json else structlog.dev.set_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Asked for at each event: stderr may be another by then (a test's capture, a redirection).
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
