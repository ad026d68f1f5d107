"""Policies beside the trained one: adapters where there is LoRA, else frozen copies of every weight.

Both are named alike: `default` is trained, `old` and `ema` follow it when they are told to, and the
reference is what training began with. A copy that follows lies like the trained weights, format
included, so that each rank updates its own part. The reference is made when something first looks at
it: in the format of computation, sharded or whole by `engine.shard_base` as a frozen base is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import structlog
from torch import nn
from torch.distributed.fsdp import FSDPModule

from omni_core.choices import Policy
from omni_core.engine import CheckpointError
from omni_core.model import Denoiser
from omni_engine_fsdp.content_hash import content_hash
from omni_engine_fsdp.lora import LoRAAdapterMixin

log = structlog.get_logger()

REFERENCE = Policy.REFERENCE.value
EMA = Policy.EMA.value


@attrs.frozen(kw_only=True, eq=False)
class PolicyModules:
    """The experts of one policy, on the engine's device."""

    denoiser: Denoiser
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    """Expert -> name -> parameter, sharded unless it is whole on every rank."""
    units: Mapping[str, Sequence[FSDPModule]]
    """Expert -> its FSDP units, the root first; none where it is whole."""


class PolicyMixin(LoRAAdapterMixin):
    """What `LoRAAdapterMixin` does, also for an engine that trains every weight."""

    denoiser: Denoiser
    """Of the policy in use."""
    copies: dict[str, PolicyModules]
    """Name -> modules, `default` among them, where every weight is trained; else empty."""
    reference_hash: str | None
    """Content hash of the reference that was made, or that a loaded checkpoint was trained against."""

    def make_reference(self, seen: Callable[[Denoiser], None]) -> PolicyModules:
        """Load the reference; *seen* is called with its whole weights, before they are sharded."""
        raise NotImplementedError

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the policies that are kept, the trained one first; without LoRA the reference is not among them."""
        return super().adapters or tuple(name for name in self.copies if name != REFERENCE)

    @contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        """Predict with another policy.

        Raises:
            ValueError: no such policy; lists those that exist.
        """
        if self.layers:
            with super().use_adapter(name):
                yield
        else:
            self._require_adapter(name)
            with self._in_use(self.copies[name]):
                yield

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Predict with the model that training began with; every requires_grad stays as it is.

        Without LoRA that is a second copy of all weights, made when this is first called: a collective.
        """
        if self.layers:
            with super().disable_adapter():
                yield
        else:
            with self._in_use(self._reference_modules()):
                yield

    @contextmanager
    def merged_adapter(self, name: str) -> Iterator[None]:
        """Predict with an adapter added to the weights; without LoRA, with the policy itself.

        Raises:
            ValueError: no such policy.
        """
        merged = super().merged_adapter(name) if self.layers else self.use_adapter(name)
        with merged:
            yield

    def adapter_parameters(self, adapter: str) -> dict[str, dict[str, nn.Parameter]]:
        """Return a policy's own parameters: expert -> name without the adapter's -> parameter.

        Raises:
            ValueError: no such policy.
        """
        if self.layers:
            return super().adapter_parameters(adapter)
        self._require_adapter(adapter)
        return {name: dict(found) for name, found in self.copies[adapter].parameters.items()}

    def compare_reference(self, digest: str | None) -> None:
        """Compare the reference, if it was made, with the one that a checkpoint was trained against.

        Raises:
            CheckpointError: it is another one.
        """
        if digest is not None and REFERENCE in self.copies and self.reference_hash != digest:
            raise _other_reference(digest, self.reference_hash)

    def expect_reference(self, digest: str | None) -> None:
        """Hold the reference, made or yet to be made, to the one that a checkpoint was trained against.

        Raises:
            CheckpointError: it is another one.
        """
        self.compare_reference(digest)
        if digest is not None:
            self.reference_hash = digest

    @contextmanager
    def _in_use(self, policy: PolicyModules) -> Iterator[None]:
        former, self.denoiser = self.denoiser, policy.denoiser
        try:
            yield
        finally:
            self.denoiser = former

    def _reference_modules(self) -> PolicyModules:
        if REFERENCE not in self.copies:
            self.copies[REFERENCE] = self.make_reference(self._check_reference)
            log.info("engine.reference_made", hash=self.reference_hash)
        return self.copies[REFERENCE]

    def _check_reference(self, denoiser: Denoiser) -> None:
        found = content_hash(
            (f"{name}.{key}", parameter)
            for name, expert in denoiser.experts.items()
            for key, parameter in expert.named_parameters()
        )
        if self.reference_hash not in (None, found):
            raise _other_reference(self.reference_hash, found)
        self.reference_hash = found


def _other_reference(expected: str | None, found: str | None) -> CheckpointError:
    return CheckpointError(
        f"the reference of the checkpoint has the hash {expected}, and the weights at model.path have "
        f"{found}: training began with other weights, or in another model.dtype"
    )
