"""The process that an engine lives in: `python -m omni_rollout_vllm.engine_process FD`.

It reads requests from the socket that it inherited and answers each, until the other side closes it.
Everything that libraries print goes to this process's own output, which the rollout keeps in a file.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from omni_core.rollout import WeightMismatchError
from omni_rollout_vllm import messages, upstream, vllm_hooks


def main(argv: list[str]) -> int:
    """Serve one connection."""
    multiprocessing.set_start_method("spawn")  # what vLLM's workers are started with
    with Connection(int(argv[0])) as connection:
        try:
            spec = connection.recv()
        except EOFError:
            return 0
        with asyncio.Runner() as runner:
            host = _start(connection, spec, runner)
            if host is None:
                return 1
            try:
                _serve(connection, host, runner)
            finally:
                host.close()
    return 0


def _start(connection: Connection, spec: messages.EngineSpec, runner: asyncio.Runner) -> Any:
    """Start the engine and say so; None if it does not start."""
    try:
        vllm_hooks.torchvision_importable()
        upstream.check()
        from omni_rollout_vllm.host import EngineHost

        host = EngineHost(spec)
        runner.run(host.warm_up())
    except Exception as error:  # noqa: BLE001 -- told to the other side, which raises it
        connection.send(failed(error))
        return None
    connection.send(messages.Answer())
    return host


def _serve(connection: Connection, host: Any, runner: asyncio.Runner) -> None:
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = messages.Answer(value=runner.run(host.answer(request)))
        except Exception as error:  # noqa: BLE001 -- told to the other side, which raises it
            answer = failed(error)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def failed(error: Exception) -> messages.Answer:
    """Put an exception into an answer."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return messages.Answer(
        error=said,
        mismatch=isinstance(error, WeightMismatchError),
        details="".join(traceback.format_exception(error)),
    )


if __name__ == "__main__":
    _code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # everything is closed; libraries' own clean-up takes seconds more
