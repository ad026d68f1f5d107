"""One method of vLLM-Omni replaced on CPU, for worker processes (`mp`) alone.

`WorkerProc._async_output_loop` copies results on a side stream of the accelerator; without one its
thread dies and every request hangs.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Replace the method where vLLM-Omni runs on this package's CPU platform."""
    from vllm_omni.platforms import current_omni_platform

    if current_omni_platform.device_type != "cpu":
        return
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    WorkerProc._async_output_loop = _async_output_loop


def _async_output_loop(self: Any) -> None:
    """Pack and send each result of the worker, in order, until None comes."""
    from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
    from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        found: dict[str, Any] = {"output": output}
        try:
            pack_diffusion_output_shm(output)
        except Exception as exc:  # noqa: BLE001 -- told to whoever waits for the result
            found = {"error": f"packing a result failed: {exc}"}
        try:
            self._enqueue_result(
                AsyncDiffusionOutput(
                    kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, **found
                )
            )
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()
