"""One vLLM-Omni diffusion engine, asked in the words of `messages`; lives in the engine's process.

Every batch is one wave of the engine's scheduler: scheduling is held while its requests are queued, so
the same rows are always denoised together. Letters: B rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.plugins import load_omni_general_plugins

from omni_core.choices import StepKind
from omni_core.rollout import WeightMismatchError
from omni_core.trajectory import Conditioning, Media, SamplingSpec
from omni_rollout_vllm import messages
from omni_rollout_vllm.families import Folder, family_of
from omni_rollout_vllm.families.family import IMAGE
from omni_rollout_vllm.pipelines import KEY, PREFIX, RowOrder
from omni_rollout_vllm.worker_extension import WeightsExtension, lora_request

log = structlog.get_logger()

PROBE = messages.Row(prompt="a probe", seed=0, window=())


class EngineError(RuntimeError):
    """The engine refused or failed; its own words follow."""


class EngineHost:
    """Starts the engine; every method is run on one event loop, one at a time."""

    def __init__(self, spec: messages.EngineSpec) -> None:
        self.spec = spec
        self.folder = Folder(Path(spec.model))
        self.family = family_of(self.folder)
        load_omni_general_plugins()
        config = OmniDiffusionConfig.from_kwargs(**self._config())
        config.enrich_config()
        # Not `make_engine`: its warm-up draws 512 x 512 px, whatever the model can.
        self.engine = DiffusionEngine.resolve_engine_class(config)(config)
        self._numbers: dict[str, int] = {}
        """Adapter -> its number in the engine."""
        self._requests = 0
        self._probes: dict[str | None, Tensor] = {}
        """Adapter -> what the probe was with it, as pushed last; None for the weights alone."""
        self._update: messages.BeginUpdate | None = None
        self._loaded = 0

    def _config(self) -> dict[str, Any]:
        spec = self.spec
        found: dict[str, Any] = {
            "model": spec.model,
            "model_class_name": f"{PREFIX}{self.family.pipeline_class}",
            "dtype": getattr(torch, spec.dtype),
            "max_num_seqs": spec.batch_size,
            "enforce_eager": spec.enforce_eager,
            "worker_extension_cls": f"{WeightsExtension.__module__}.{WeightsExtension.__qualname__}",
            "max_cpu_loras": spec.adapters,
            "num_gpus": spec.tensor_parallel,
            "enable_sleep_mode": True,
        }
        if spec.tensor_parallel > 1:
            found["parallel_config"] = {"tensor_parallel_size": spec.tensor_parallel}
        if spec.executor is not None:
            found["distributed_executor_backend"] = spec.executor
        return found

    async def answer(self, request: Any) -> Any:
        """Do what a message asks."""
        match request:
            case messages.SampleBatch():
                return await self.sample(request)
            case messages.BeginUpdate():
                return await self.begin_update(request)
            case messages.TakeBucket():
                return await self.take(request)
            case messages.EndUpdate():
                return await self.end_update(request)
            case messages.Sleep():
                return await self.sleep(request.level)
            case messages.Wake():
                return await self.wake()
            case messages.Describe():
                return await self._first("omni_module_names")
            case _:
                msg = f"an engine is not asked for {type(request).__name__}"
                raise EngineError(msg)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    # -- sampling ----------------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Draw the probe, so that a model that cannot run says so at the start."""
        self._probes[None] = await self._probe(None)

    async def sample(self, batch: messages.SampleBatch) -> messages.SampledBatch:
        """Denoise a batch.

        Raises:
            EngineError: the engine failed on a request; with its message.
        """
        outputs = await self._run([self._request(batch, row) for row in batch.rows])
        carried = [output.output["metadata"][KEY] for output in outputs]
        media = [Media(**one["media"]) for one in carried if "media" in one]
        return messages.SampledBatch(
            latents={
                name: torch.cat([one["latents"][name] for one in carried])
                for name in carried[0]["latents"]
            },
            log_probs=torch.cat([one["log_probs"] for one in carried]),
            conditioning={
                one["text"]: self._conditioning(one["encoded"])
                for one in carried
                if "encoded" in one
            },
            media=Media.concat(media) if media else None,
            effective=self._effective(batch, carried[0]),
        )

    def _conditioning(self, branches: Sequence[Any]) -> Conditioning:
        return self.family.conditioning(branches[0], branches[1] if len(branches) == 2 else None)

    def _effective(self, batch: messages.SampleBatch, carried: Any) -> SamplingSpec:
        """Say what was used, from what the pipeline was heard and seen to use."""
        facts = carried["facts"]
        negative: list[str] = facts["negative_prompts"]
        asked = batch.sampling
        drawn = {name: tuple(value.shape[2:]) for name, value in carried["latents"].items()}
        wanted = self.family.latent_shapes(self.folder, asked)
        if drawn != wanted:
            msg = f"latents are {drawn}, {asked.height} x {asked.width} px are {wanted}"
            raise EngineError(msg)
        if len(negative) > 1:
            msg = f"several negative prompts were used: {negative}"
            raise EngineError(msg)
        return attrs.evolve(
            asked,
            sigmas=tuple(facts["sigmas"]),
            guidance_scale=facts["guidance_scale"],
            max_sequence_length=facts["max_sequence_length"],
            # Without guidance no negative prompt is read: the one that was asked for changes nothing.
            negative_prompt=negative[0] if negative else asked.negative_prompt,
            kind=StepKind.parse(facts["kind"]),
            noise_level=facts["noise_level"],
        )

    def _request(self, batch: messages.SampleBatch, row: messages.Row) -> OmniDiffusionRequest:
        spec = batch.sampling
        order = RowOrder(
            batch=batch.name,
            size=len(batch.rows),
            seed=row.seed,
            window=row.window,
            sampling=spec,
            decode=batch.decode,
        )
        parameters = OmniDiffusionSamplingParams(
            height=spec.height,
            width=spec.width,
            num_frames=spec.num_frames,
            num_inference_steps=spec.num_steps,
            max_sequence_length=spec.max_sequence_length,
            num_outputs_per_prompt=1,
            seed=row.seed,
            output_type="pt" if batch.decode else "latent",
            lora_request=self._lora(batch.adapter),
            extra_args={KEY: order},
            **self.family.guidance_fields(spec.guidance_scale),
        )
        self._requests += 1
        return OmniDiffusionRequest(
            prompt={"prompt": row.prompt, "negative_prompt": spec.negative_prompt},
            sampling_params=parameters,
            request_id=f"row-{self._requests}",
        )

    def _lora(self, adapter: str | None) -> Any:
        return None if adapter is None else lora_request(adapter, self._numbers[adapter])

    async def _run(self, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
        """Run requests as one wave."""
        limit = self.spec.timeout
        hold = {"kwargs": {"mode": "keep"}, "timeout": limit}
        await self.engine.async_collective_rpc("pause_scheduler", **hold)
        try:
            ids = [self.engine.add_request(request) for request in requests]
        finally:
            await self.engine.async_collective_rpc("resume_scheduler", timeout=limit)
        return list(await asyncio.gather(*(self._finished(name) for name in ids)))

    async def _finished(self, request_id: str) -> DiffusionOutput:
        output: DiffusionOutput | None = None
        async for found in self.engine.get_output_stream(request_id):
            output = found
            if found.async_output_id:
                ready = self.engine.executor.wait_output_ready(found.async_output_id)
                output = await asyncio.wait_for(asyncio.wrap_future(ready), self.spec.timeout)
        if output is None or output.aborted:
            msg = f"the engine aborted {request_id}: {output and output.abort_message}"
            raise EngineError(msg)
        if output.error:
            raise EngineError(output.error)
        return output

    async def _probe(self, adapter: str | None) -> Tensor:
        """Draw the final latents of one step from a fixed prompt and seed."""
        batch = messages.SampleBatch(
            name=f"probe-{self._requests}",
            sampling=self.spec.probe,
            adapter=adapter,
            rows=(PROBE,),
            decode=False,
        )
        (output,) = await self._run([self._request(batch, PROBE)])
        found: Tensor = output.output["metadata"][KEY]["latents"][IMAGE][0, -1]
        return found.clone()

    # -- weights -----------------------------------------------------------------------------------

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker.

        Raises:
            WeightMismatchError: one answered with a mismatch.
            EngineError: one failed, or did not answer in time.
        """
        try:
            found = await self.engine.async_collective_rpc(
                "omni_call", args=(method, *args), timeout=self.spec.timeout
            )
        except TimeoutError as error:
            msg = f"{method} took longer than {self.spec.timeout} s"
            raise EngineError(msg) from error
        answers = found if isinstance(found, list) else [found]
        for one in answers:
            check_reply(one, method)
            if "mismatch" in one:
                raise WeightMismatchError(one["mismatch"])
        return [one["result"] for one in answers]

    async def _first(self, method: str, *args: Any) -> Any:
        return (await self._workers(method, *args))[0]

    async def begin_update(self, update: messages.BeginUpdate) -> tuple[str, ...]:
        """Check names; nothing of the engine changes."""
        self._update = None
        mapped = await self._first("omni_map", update.names, update.adapter)
        self._update, self._loaded = update, 0
        return tuple(mapped)

    async def take(self, message: messages.TakeBucket) -> int:
        """Take one bucket."""
        update = self._begun()
        method = "omni_load" if update.at_once else "omni_take"
        taken: int = await self._first(method, message.bucket)
        self._loaded = self._loaded + taken if update.at_once else taken
        return self._loaded

    async def end_update(self, message: messages.EndUpdate) -> messages.Bound:
        """Bind what came, and draw the probe with it."""
        update, self._update = self._begun(), None
        if self._loaded != len(update.names):
            msg = f"{self._loaded} of {len(update.names)} tensors came"
            raise WeightMismatchError(msg)
        sampled = None if message.merge else message.adapter
        if not update.adapter:
            names = await self._first("omni_check_loaded", update.names, self._loaded)
        elif message.merge:
            names = await self._first(
                "omni_merge_adapter", self.spec.model, message.alpha_over_rank
            )
        else:
            assert sampled is not None
            number = self._numbers.setdefault(sampled, len(self._numbers) + 1)
            names = await self._first("omni_bind_adapter", sampled, number, message.alpha_over_rank)
        changed = await self._changed(sampled) if message.probe else None
        return messages.Bound(names=tuple(names), changed=changed)

    async def _changed(self, adapter: str | None) -> bool:
        """Draw the probe; whether it differs from the last one of these weights, or of the base."""
        before = self._probes.get(adapter, self._probes[None])
        if adapter is None:
            self._probes.clear()  # adapters stand on other weights now
        after = self._probes[adapter] = await self._probe(adapter)
        return not torch.equal(before, after)

    def _begun(self) -> messages.BeginUpdate:
        if self._update is None:
            msg = "no update was begun, or its names did not fit"
            raise EngineError(msg)
        return self._update

    # -- memory ------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> int:
        """Put the weights aside; returns how many bytes the engine says it gave back.

        Raises:
            EngineError: the workers refuse the level.
        """
        acks = await self._task("handle_sleep_task", level=level)
        return int(sum(ack.freed_bytes or 0 for ack in acks))

    async def wake(self) -> None:
        """Bring them back."""
        await self._task("handle_wake_task", tags=["weights"])

    async def _task(self, method: str, **task: Any) -> list[Any]:
        """Give the workers a task, and read their acknowledgements.

        Raises:
            EngineError: one acknowledges an error, or none acknowledges.
        """
        self._requests += 1
        found = await self.engine.async_collective_rpc(
            method,
            args=({"task_id": f"{method}-{self._requests}", **task},),
            timeout=self.spec.timeout,
        )
        acks = [ack for ack in (found if isinstance(found, list) else [found]) if ack is not None]
        for ack in acks:
            check_reply(ack, method)
        if not acks:
            msg = f"no worker acknowledged {method}"
            raise EngineError(msg)
        return acks


def check_reply(reply: Any, method: str) -> None:
    """Turn the ways in which workers report a failure without raising into an exception.

    Raises:
        EngineError: an error dictionary, an unsupported call, or an acknowledgement of status ERROR.
    """
    if isinstance(reply, dict):
        said = reply.get("error") or reply.get("todo")
        if said or reply.get("supported") is False:
            msg = f"{method} failed: {said or reply}"
            raise EngineError(msg)
    elif getattr(reply, "status", "SUCCESS") != "SUCCESS":
        msg = f"{method} was acknowledged with {reply.status}: {reply.error_msg}"
        raise EngineError(msg)
