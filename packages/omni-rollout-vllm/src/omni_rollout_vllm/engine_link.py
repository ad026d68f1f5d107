"""The rollout's end of one engine: its process, its time limits, and what it printed when it died."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from omni_core.rollout import RolloutTimeoutError, WeightMismatchError
from omni_rollout_vllm import messages

log = structlog.get_logger()

TAIL = 4000
"""Characters of an engine's output that an error shows."""
ENDING = 20.0
"""Seconds that an engine has to end by itself."""
_OWN = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Set for an engine unless the user's environment has them."""
_NOT_ITS_OWN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Of the trainer's process group, which an engine must not join."""


class EngineDiedError(RuntimeError):
    """An engine's process ended, or was ended because it took too long."""


class RolloutEngineError(RuntimeError):
    """An engine answered with an error; it still runs."""


class EngineLink:
    """One engine process. `start` first, `close` last; one call at a time."""

    def __init__(self, spec: messages.EngineSpec, *, number: int, cpu_devices: str) -> None:
        self.spec = spec
        self.number = number
        self._cpu_devices = cpu_devices
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._output = tempfile.NamedTemporaryFile(  # noqa: SIM115 -- closed by `close`
            prefix=f"omni-engine-{number}-", suffix=".log"
        )

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether there is an engine to ask."""
        process = self._process
        return self._connection is not None and process is not None and process.poll() is None

    def start(self, *, timeout: float) -> None:
        """Start the process and wait until its engine has drawn a probe.

        Raises:
            RolloutEngineError: the engine did not start; with its own message.
            EngineDiedError: its process ended, or took longer than *timeout* seconds.
        """
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "omni_rollout_vllm.engine_process",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._environment(),
                start_new_session=True,  # so that its workers end with it
            )
        self._connection = Connection(ours.detach())
        try:
            self.call(self.spec, timeout=timeout, what="start")
        except RolloutTimeoutError as error:
            raise EngineDiedError(str(error)) from error
        except BaseException:
            self.end()
            raise
        log.info("engine.started", engine=self.number, pid=self.pid)

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_ITS_OWN}
        return {**_OWN, **kept, "OMNI_ROLLOUT_CPU_DEVICES": self._cpu_devices}

    def call(self, request: Any, *, timeout: float, what: str | None = None) -> Any:
        """Send a message and return the answer's value.

        Raises:
            RolloutEngineError: the engine raised.
            WeightMismatchError: it says that names do not fit.
            EngineDiedError: its process is gone.
            RolloutTimeoutError: no answer in *timeout* seconds; the engine was ended.
        """
        said = what or type(request).__name__
        with self._lock:
            connection = self._connection
            if connection is None:
                msg = f"engine {self.number} does not run"
                raise EngineDiedError(msg)
            try:
                connection.send(request)
                if not connection.poll(timeout):
                    self.end(patience=0.0)
                    msg = f"engine {self.number}: {said} took longer than {timeout} s; it was ended"
                    raise RolloutTimeoutError(msg)
                answer: messages.Answer = connection.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError) as error:
                raise self._died(said) from error
        if answer.error is None:
            return answer.value
        if answer.mismatch:
            raise WeightMismatchError(answer.error.removeprefix("WeightMismatchError: "))
        msg = f"engine {self.number}: {said} failed: {answer.error}\n{answer.details}".rstrip()
        raise RolloutEngineError(msg)

    def _died(self, what: str) -> EngineDiedError:
        process, code = self._process, None
        self.end(patience=1.0)
        if process is not None:
            code = process.poll()
        return EngineDiedError(
            f"engine {self.number} died during {what} (exit code {code}); its output ends with:\n"
            f"{self.output_tail()}"
        )

    def output_tail(self) -> str:
        """Return the end of what the process printed."""
        text = Path(self._output.name).read_text(encoding="utf-8", errors="replace")
        return text[-TAIL:].strip()

    def end(self, *, patience: float = ENDING) -> None:
        """End the process: it closes by itself when its connection does, and is killed if it does not."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        process = self._process
        if process is None:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = None

    def close(self) -> None:
        """End the process, and forget what it printed."""
        self.end()
        self._output.close()
