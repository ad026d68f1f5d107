"""What a tracker is told of the engines."""

from __future__ import annotations

import pytest

from omni_rollout_vllm.counts import Counts


def test_numbers_are_of_the_time_since_they_were_asked_last() -> None:
    counts = Counts()
    assert counts.take(engines=2) == {"queue": 0.0, "restarts": 0.0}
    counts.rows, counts.busy_seconds, counts.queue, counts.restarts = 12, 4.0, 3, 1
    counts.pushed_bytes = 100
    with counts.timed("send"):
        pass
    with pytest.raises(OSError, match="lost"), counts.timed("send"):
        raise OSError("lost")
    found = counts.take(engines=2)

    assert found["images_per_second"] == 6.0
    assert found["queue"] == 3.0
    assert found["restarts"] == 1.0
    assert found["pushed_bytes"] == 100.0
    assert 0.0 < found["push_send_seconds"] < 1.0
    assert counts.restarts == 1, "counted on, against the limit"
    assert counts.take(engines=2) == {"queue": 0.0, "restarts": 0.0}
