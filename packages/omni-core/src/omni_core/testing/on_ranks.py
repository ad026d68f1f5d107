"""A suite on several processes: each runs the same tests in the same order, so that they meet in every collective.

`OnRanks` is mixed into a suite. In the process that pytest was started in, its tests only look up what
the ranks said of them; all such classes of a file share one start of the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest

IN_RANK = "OMNI_ON_RANKS"
"""Environment variable of the processes that are started here."""
TELL = 4000
"""Characters of a rank's log that a failure shows."""
_PATIENCE = timedelta(seconds=5.0)


class OnRanks:
    """Mix in before a suite: `class TestMineOnTwoRanks(OnRanks, EngineSuite)`.

    Each of `ranks` processes runs the class's tests, with torch.distributed initialised (so that an engine
    finds its process group), RANK, WORLD_SIZE and LOCAL_RANK set, and one `tmp_path` for all of them. A test
    passes where it passed on every rank. After one that did not end alike on all of them, the rest is not
    run. The first test of a file waits for all others, which a time limit has to allow.
    """

    ranks = 2
    backend = "gloo"
    """Of torch.distributed."""
    collective_seconds = 60.0
    """How long a rank waits for the others in a collective, and after a test."""
    total_seconds = 600.0
    """How long all tests of a file may take."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if IN_RANK in os.environ:
            return
        for name in dir(cls):
            if name.startswith("test"):
                setattr(cls, name, _looks_up(name, getattr(cls, name).__doc__))


def _looks_up(name: str, says: str | None) -> Any:
    def test(self: OnRanks, request: pytest.FixtureRequest) -> None:
        _told(request, type(self)).judge(type(self).__name__, name)

    test.__name__, test.__doc__ = name, says
    return test


# -- the process that pytest was started in ----------------------------------------------------------


@attrs.frozen(kw_only=True)
class Told:
    """What the ranks said."""

    records: Sequence[Sequence[dict[str, str]]]
    """Of each rank, in the order in which they ended."""
    logs: Sequence[str]
    """The end of what each rank wrote."""
    ended: str
    """How the processes ended, in words."""

    def judge(self, owner: str, name: str) -> None:
        """Pass, skip or fail as the ranks did."""
        found = [
            [record for record in own if (record["owner"], record["name"]) == (owner, name)]
            for own in self.records
        ]
        failed = [
            f"rank {rank}, {record['id']}:\n{record['text']}"
            for rank, own in enumerate(found)
            for record in own
            if record["outcome"] == "failed"
        ]
        if failed:
            pytest.fail("\n\n".join(failed), pytrace=False)
        counts = {len(own) for own in found}
        if counts == {0} or len(counts) > 1:
            pytest.fail(self._missing(), pytrace=False)
        if all(record["outcome"] == "skipped" for own in found for record in own):
            pytest.skip(found[0][0]["text"])

    def _missing(self) -> str:
        bad = [
            f"rank {rank}: {record['id']}"
            for rank, own in enumerate(self.records)
            for record in own
            if record["outcome"] == "failed"
        ]
        after = f"; failed before: {', '.join(bad)}" if bad else ""
        logs = "\n\n".join(f"rank {rank} wrote:\n{text}" for rank, text in enumerate(self.logs))
        return f"not run on every rank ({self.ended}){after}\n{logs}"


_FILES: dict[tuple[Path, int, str, float], Told] = {}


def _told(request: pytest.FixtureRequest, kind: type[OnRanks]) -> Told:
    key = (request.path, kind.ranks, kind.backend, kind.collective_seconds)
    if key not in _FILES:
        tests = [
            f"{item.path}::{item.cls.__name__}::{item.name}"
            for item in request.session.items
            if isinstance(item, pytest.Function)
            and item.path == request.path
            and item.cls is not None
            and issubclass(item.cls, OnRanks)
            and (item.path, item.cls.ranks, item.cls.backend, item.cls.collective_seconds) == key
        ]
        # Until they have ended: what interrupts the wait, a time limit, must not start them again.
        _FILES[key] = Told(records=[[]] * kind.ranks, logs=[], ended="nobody waited for its end")
        _FILES[key] = _start(tests, kind, request.config)
    return _FILES[key]


def _start(tests: Sequence[str], kind: type[OnRanks], config: pytest.Config) -> Told:
    with TemporaryDirectory(prefix="on-ranks-") as name:
        folder = Path(name)
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath)]
        if config.inipath is not None:
            options += ["-c", str(config.inipath)]
        job = {
            "arguments": [*options, *tests],
            "size": kind.ranks,
            "backend": kind.backend,
            "seconds": kind.collective_seconds,
        }
        (folder / "job.json").write_text(json.dumps(job))
        codes = _run(folder, kind)
        records = [_records(folder / f"told.{rank}") for rank in range(kind.ranks)]
        logs = [
            (folder / f"log.{rank}").read_text(errors="replace")[-TELL:]
            for rank in range(kind.ranks)
        ]
    ended = ", ".join(
        f"rank {rank} was stopped after {kind.total_seconds:g} s"
        if code is None
        else f"rank {rank} ended with {code}"
        for rank, code in enumerate(codes)
    )
    return Told(records=records, logs=logs, ended=ended)


def _run(folder: Path, kind: type[OnRanks]) -> list[int | None]:
    """Run the ranks; exit codes, None of those that were late."""
    code = f"from {__name__} import main; main()"
    started = []
    for rank in range(kind.ranks):
        environment = {
            **os.environ,
            IN_RANK: str(folder),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(kind.ranks),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with (folder / f"log.{rank}").open("w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
    until = time.monotonic() + kind.total_seconds
    codes: list[int | None] = []
    try:
        for process in started:
            try:
                codes.append(process.wait(timeout=max(until - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes


def _records(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


# -- a rank ------------------------------------------------------------------------------------------


class _Rank:
    """The plugin of a rank's own pytest: writes down how tests end, and waits for the other ranks."""

    def __init__(self, folder: Path, rank: int, size: int, store: Any, limit: timedelta) -> None:
        self.folder, self.rank, self.size, self.store, self.limit = folder, rank, size, store, limit
        self._reports: list[pytest.TestReport] = []
        self._tests = 0

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One directory for all ranks."""
        path = self.folder / "tmp" / str(self._tests)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, object, object]:
        self._reports.clear()
        self._tests += 1
        result = yield
        outcome, text = self._outcome()
        record = {
            "owner": item.cls.__name__ if item.cls else "",
            "name": item.originalname,
            "id": item.nodeid,
            "outcome": outcome,
            "text": text,
        }
        with (self.folder / f"told.{self.rank}").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if not self._all_ended_so(f"{outcome} {self._where()}"):
            item.session.shouldstop = f"{item.nodeid} did not end alike on every rank"
        return result

    def _outcome(self) -> tuple[str, str]:
        for outcome in ("failed", "skipped"):
            for report in self._reports:
                if report.outcome == outcome:
                    told = report.longrepr
                    return outcome, told[2] if isinstance(told, tuple) else report.longreprtext
        return "passed", ""

    def _where(self) -> str:
        """Where it failed: ranks that fail in the same place are still in step."""
        crashes = [
            getattr(getattr(report.longrepr, "reprcrash", None), "lineno", None)
            for report in self._reports
            if report.failed
        ]
        return str(crashes)

    def _all_ended_so(self, mine: str) -> bool:
        names = [f"{self._tests}/{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], mine)
        # A rank that failed alone leaves soon: that ends the collective which the others wait in.
        limit = min(self.limit, _PATIENCE) if mine.startswith("failed") else self.limit
        try:
            self.store.wait(names, limit)
        except RuntimeError:  # a rank is late, or gone
            return False
        return {self.store.get(name).decode() for name in names} == {mine}


def main() -> None:
    """Be one of the ranks that `OnRanks` starts."""
    import torch.distributed as dist

    folder = Path(os.environ[IN_RANK])
    job = json.loads((folder / "job.json").read_text())
    rank, size, limit = int(os.environ["RANK"]), job["size"], timedelta(seconds=job["seconds"])
    dist.init_process_group(
        job["backend"],
        init_method=f"file://{folder / 'group'}",
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    store = dist.FileStore(str(folder / "tests"), size)  # type: ignore[attr-defined] # absent from the stub
    # Beside the rest that goes with the folder, not among the user's numbered directories.
    own = ["--basetemp", str(folder / f"base.{rank}")]
    code = pytest.main([*own, *job["arguments"]], plugins=[_Rank(folder, rank, size, store, limit)])
    dist.destroy_process_group()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a backend that reference cycles keep alive abort a process at its exit now and then.
    os._exit(int(code))
