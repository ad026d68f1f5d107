"""Logs are events with keys on stderr; what is bound stands on every one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from omni_core import log


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_an_event_is_a_json_line_with_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True, rank=3)
    structlog.get_logger().info("step.done", step=7, loss=0.5)
    (event,) = events(capsys)
    assert event.pop("timestamp")
    assert event == {"event": "step.done", "step": 7, "loss": 0.5, "rank": 3, "level": "info"}


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True, level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [event["event"] for event in events(capsys)] == ["loud"]


def test_setting_up_again_replaces_what_was_bound(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True, rank=0, role="rollout")
    log.configure(json=True, rank=1)
    structlog.get_logger().info("x")
    (event,) = events(capsys)
    assert event["rank"] == 1
    assert "role" not in event


def test_an_exception_is_part_of_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True)
    try:
        raise ValueError("x")
    except ValueError:
        structlog.get_logger().exception("failed")
    (event,) = events(capsys)
    assert "ValueError" in json.dumps(event["exception"])


def test_without_a_terminal_json_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    structlog.get_logger().info("x")
    assert events(capsys)[0]["event"] == "x"


def test_a_person_gets_readable_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=False)
    structlog.get_logger().info("step.done", step=7)
    err = capsys.readouterr().err
    assert "step.done" in err
    assert not err.startswith("{")
