"""Devices: the CPU is always there, and an accelerator is asked for in one place."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from omni_core import device


def test_the_cpu_is_always_there_and_last() -> None:
    assert device.available()[-1] == "cpu"
    assert device.resolve("cpu") == torch.device("cpu")
    assert device.count("cpu") >= 1


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(device.DeviceError, match="'abacus' is not available here; available: auto"):
        device.resolve("abacus")


def test_the_cpu_has_no_memory_of_its_own() -> None:
    assert not device.is_accelerator("cpu")
    assert device.memory_allocated("cpu") == device.peak_memory("cpu") == 0
    assert device.total_memory("cpu") > 2**20
    device.synchronize("cpu")
    device.empty_cache("cpu")


class Fake(types.SimpleNamespace):
    """What torch offers for an accelerator, as far as it is asked here."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))

    def synchronize(self) -> None:
        self.calls.append(("synchronize",))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def memory_allocated(self) -> int:
        return 10

    def max_memory_allocated(self) -> int:
        return 20

    def get_rng_state(self) -> torch.Tensor:
        return torch.tensor([7], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.calls.append(("set_rng_state", state.tolist()))


@pytest.fixture(
    params=[
        kind for kind in device.ACCELERATORS if hasattr(getattr(torch, kind, None), "set_device")
    ]
)
def accelerator(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """A machine with two accelerators of one kind: a mock, where there is none to ask."""
    kind = request.param
    fake = Fake()
    monkeypatch.setattr(torch, kind, fake)
    return kind, fake


def test_an_accelerator_is_preferred_and_ranks_share_out_its_devices(
    accelerator: tuple[str, Any],
) -> None:
    kind, fake = accelerator
    assert device.available()[0] == kind
    assert device.count(kind) == 2
    found = [device.resolve(local_rank=rank).index for rank in range(3)]
    assert found == [0, 1, 0]
    assert fake.calls == [("set_device", 0), ("set_device", 1), ("set_device", 0)]
    assert device.resolve("cpu").type == "cpu"


def test_an_accelerator_is_asked_through_its_own_module(accelerator: tuple[str, Any]) -> None:
    kind, fake = accelerator
    assert device.is_accelerator(kind)
    assert (device.memory_allocated(kind), device.peak_memory(kind)) == (10, 20)
    device.synchronize(kind)
    device.empty_cache(kind)
    assert fake.calls == [("synchronize",), ("empty_cache",)]
    states = device.rng_state(kind)
    assert set(states) == {"cpu", kind}
    device.set_rng_state(states)
    assert fake.calls[-1] == ("set_rng_state", [7])


def test_every_kind_has_a_backend_and_a_resource() -> None:
    assert device.collective_backend("cpu") == "gloo"
    for kind in device.ACCELERATORS:
        assert device.ray_resource(kind)
        try:
            torch.device(kind)
        except RuntimeError:  # its name is known to torch only once its package is imported
            continue
        backend = device.collective_backend(kind)
        assert backend == "gloo" or backend.startswith(f"cpu:gloo,{kind}:")
    assert device.ray_resource("cpu") == "CPU"
    assert device.visible_variable("cpu") is None
    assert device.visible_variable(device.ACCELERATORS[0])


def test_generator_states_are_put_back() -> None:
    states = device.rng_state("cpu")
    first = torch.rand(3)
    device.set_rng_state(states)
    assert torch.equal(torch.rand(3), first)
