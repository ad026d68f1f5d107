"""What every rollout keeps: a sample is the same wherever it is drawn, and states are explicit.

Axes: B rows, T steps, W stochastic steps of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.model import Guidance, Step
from omni_core.reverse_step import Latents, reverse_step
from omni_core.rollout import (
    BaseRollout,
    RolloutHandle,
    RolloutState,
    RolloutStateError,
    WeightMismatchError,
    WeightUpdate,
)
from omni_core.seeds import initial_noise
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Conditioning, RolloutRequest, SamplingSpec, Trajectory

Velocity = Callable[[Latents, Step, Conditioning, Guidance], Latents]
"""`Denoiser.velocity` of the policy that samples."""


class RolloutSuite:
    """Subclass as `class TestMyRollout(RolloutSuite)`; provide the fixtures `rollout` and `sampling`.

    `velocity`, `make_update` and `sleeps` open further tests; without them those are skipped.
    """

    batch_bound = 1e-4
    """How far final latents may move with the batch that a sample is drawn in."""

    patience = 60.0
    """Seconds that a trajectory may take."""

    sleeps = False
    """Whether `sleep` is offered."""

    @pytest.fixture
    def rollout(self) -> BaseRollout:
        """A rollout that is READY; equal fixtures sample with equal weights."""
        raise NotImplementedError

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        """A stochastic spec (at least 4 steps) that the rollout serves."""
        raise NotImplementedError

    @pytest.fixture
    def velocity(self, rollout: BaseRollout) -> Velocity | None:
        """The sampling policy's velocity, without a graph; None where it cannot be called."""
        del rollout
        return None

    @pytest.fixture
    def make_update(self, rollout: BaseRollout) -> Callable[[int], WeightUpdate] | None:
        """Version -> an update that the rollout takes; None where nothing is pushed."""
        del rollout
        return None

    @pytest.fixture
    def asked(self, sampling: SamplingSpec) -> list[RolloutRequest]:
        """Three groups of two."""
        return requests_for(sampling)

    def sample(self, rollout: BaseRollout, asked: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Sample all requests, in order."""
        return rollout.generate(asked, timeout=self.patience)

    def drain(self, rollout: BaseRollout, handle: RolloutHandle) -> list[Trajectory]:
        """Poll until everything has come."""
        found: list[Trajectory] = []
        until = time.monotonic() + self.patience
        while not rollout.done(handle):
            assert time.monotonic() < until, f"nothing more in {self.patience} s"
            found += rollout.poll(handle)
        return found

    # -- what comes back ---------------------------------------------------------------------------

    def test_every_request_gives_one_trajectory(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """One trajectory for each request, whose rows are those asked for; seeds are echoed."""
        found = self.drain(rollout, rollout.submit(asked))
        by_group = {trajectory.records[0].group_id: trajectory for trajectory in found}
        assert len(found) == len(by_group) == len(asked)
        for request in asked:
            assert by_group[request.group_id].records == request.samples

    def test_a_trajectory_has_its_documented_form(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """Shapes, dtypes, media, places; every tensor owns its memory."""
        for request, trajectory in zip(asked, self.sample(rollout, asked), strict=True):
            rows, steps = len(request.samples), request.sampling.num_steps
            for value in trajectory.latents.values():
                assert value.dtype is torch.float32
                assert value.shape[:2] == (rows, steps + 1)
                assert torch.isfinite(value).all()
            assert trajectory.step_indices.dtype is torch.int64
            assert trajectory.step_indices.tolist() == [list(request.window)] * rows
            assert trajectory.log_probs.dtype is torch.float32
            assert trajectory.log_probs.shape == (rows, len(request.window))
            assert torch.isfinite(trajectory.log_probs).all()
            assert trajectory.conditioning.rows == 1, "a prompt is encoded and shipped once"
            assert trajectory.prompt_index.tolist() == [0] * rows
            assert trajectory.adapter == request.adapter
            assert trajectory.weight_version == rollout.weight_version
            assert all(0 <= place.place < place.size for place in trajectory.places)
            assert len(set(trajectory.places)) == rows
            self._check_media(trajectory)
            assert _borrowed(trajectory) == [], "a view keeps (and sends) the whole batch"

    def _check_media(self, trajectory: Trajectory) -> None:
        assert trajectory.media is not None
        sizes = []
        for field in attrs.fields(type(trajectory.media)):
            value = getattr(trajectory.media, field.name)
            if isinstance(value, Tensor):
                sizes.append(len(value))
                assert value.dtype is (torch.float32 if field.name == "audio" else torch.uint8)
        assert sizes
        assert set(sizes) == {trajectory.rows}

    def test_media_are_decoded_only_where_asked_for(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """`decode=False` leaves the codec alone."""
        assert [t.media for t in rollout.generate(asked, decode=False)] == [None] * len(asked)

    @pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
    def test_case_32_what_was_used_is_what_was_asked(
        self, rollout: BaseRollout, sampling: SamplingSpec, guidance_scale: float
    ) -> None:
        """CASES 32: no parameter is dropped or replaced; guidance 1.0 is reported as 1.0."""
        spec = attrs.evolve(sampling, guidance_scale=guidance_scale, negative_prompt="a blur")
        for trajectory in self.sample(rollout, requests_for(spec, samples_per_prompt=1)):
            assert spec.difference(trajectory.effective) is None
            assert trajectory.effective.guidance_scale == guidance_scale

    # -- a sample is its own -----------------------------------------------------------------------

    def test_noise_comes_from_the_seed_alone(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """The first state is `initial_noise(seed)`, bit for bit."""
        for trajectory in self.sample(rollout, asked):
            shapes = {name: tuple(v.shape[2:]) for name, v in trajectory.latents.items()}
            for row, record in enumerate(trajectory.records):
                for name, value in initial_noise(record.seed, shapes).items():
                    assert torch.equal(trajectory.latents[name][row, 0], value[0])

    def test_case_18_a_sample_is_the_same_alone_and_in_a_batch(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """CASES 18: equal noise bit for bit, equal latents up to the kernels' batch effects."""
        together = {t.records[0].group_id: t for t in self.sample(rollout, asked)}
        turned = {t.records[0].group_id: t for t in self.sample(rollout, asked[::-1])}
        for request in asked:
            alone = [self.sample(rollout, [one])[0] for one in request.expand()]
            for other in (turned[request.group_id], Trajectory.concat(alone)):
                for name, value in together[request.group_id].latents.items():
                    assert torch.equal(value[:, 0], other.latents[name][:, 0])
                    torch.testing.assert_close(
                        value, other.latents[name], rtol=0.0, atol=self.batch_bound
                    )

    def test_equal_requests_give_equal_samples(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """Asked again, a request gives the same bits."""
        first, again = (Trajectory.concat(self.sample(rollout, asked)) for _ in range(2))
        for name, value in first.latents.items():
            assert torch.equal(value, again.latents[name])
        assert torch.equal(first.log_probs, again.log_probs)
        assert {p.batch for p in first.places}.isdisjoint({p.batch for p in again.places})

    # -- steps -------------------------------------------------------------------------------------

    def test_case_4_what_is_scored_is_what_is_stored(
        self, rollout: BaseRollout, asked: list[RolloutRequest], velocity: Velocity | None
    ) -> None:
        """CASES 4: log-probs recomputed from the stored latents are the stored ones."""
        if velocity is None:
            pytest.skip("this rollout's velocity cannot be called")
        for trajectory in self.sample(rollout, asked):
            for column in range(trajectory.step_indices.shape[1]):
                step = int(trajectory.step_indices[0, column])
                scored = _retake(trajectory, step, velocity, score=True).require_log_prob()
                torch.testing.assert_close(
                    scored.float(), trajectory.log_probs[:, column], rtol=0.0, atol=1e-6
                )

    def test_a_window_is_stochastic_and_nothing_else_is(
        self, rollout: BaseRollout, sampling: SamplingSpec, velocity: Velocity | None
    ) -> None:
        """Groups of one submit have windows of their own; outside them a step is the Euler step."""
        asked = [
            attrs.evolve(request, window=window)
            for request, window in zip(requests_for(sampling), [(0,), (1, 2), ()], strict=True)
        ]
        found = self.sample(rollout, asked)
        assert [t.step_indices.shape[1] for t in found] == [1, 2, 0]
        if velocity is None:
            return
        for request, trajectory in zip(asked, found, strict=True):
            for step in range(sampling.num_steps):
                euler = _retake(trajectory, step, velocity, score=False)
                for name, mean in euler.next_sample.items():
                    apart = (trajectory.latents[name][:, step + 1] - mean).abs().amax()
                    assert bool(apart > 1e-3) == (step in request.window), (step, float(apart))

    def test_an_ode_has_no_log_probs(self, rollout: BaseRollout, sampling: SamplingSpec) -> None:
        """Kind `ode` gives W = 0."""
        spec = attrs.evolve(sampling, kind=StepKind.ODE, noise_level=0.0)
        trajectory = Trajectory.concat(self.sample(rollout, requests_for(spec)))
        assert trajectory.log_probs.shape == (trajectory.rows, 0)
        assert trajectory.step_indices.shape == (trajectory.rows, 0)

    @pytest.mark.parametrize("wrong", ["last", "beyond", "order", "ode"])
    def test_case_6_a_wrong_window_is_refused(
        self, rollout: BaseRollout, sampling: SamplingSpec, wrong: str
    ) -> None:
        """CASES 6: nothing is sampled before the window fits the schedule."""
        steps = sampling.num_steps
        windows = {"last": (steps - 1,), "beyond": (steps,), "order": (2, 1), "ode": (0,)}
        if wrong == "ode":
            sampling = attrs.evolve(sampling, kind=StepKind.ODE, noise_level=0.0)
        with pytest.raises(ValueError, match=r"window|step"):
            rollout.submit(requests_for(sampling, window=windows[wrong]))

    def test_an_adapter_that_does_not_exist_is_refused(
        self, rollout: BaseRollout, sampling: SamplingSpec
    ) -> None:
        """Sampling never falls back to another policy."""
        with pytest.raises(ValueError, match="no_such_adapter"):
            rollout.submit(requests_for(sampling, adapter="no_such_adapter"))

    def test_a_policy_version_that_is_not_here_is_refused(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """A request may name the version that it wants."""
        right = attrs.evolve(asked[0], weight_version=rollout.weight_version)
        assert len(self.sample(rollout, [right])) == 1
        with pytest.raises(ValueError, match="version"):
            rollout.submit([attrs.evolve(asked[0], weight_version=rollout.weight_version + 1)])

    # -- life --------------------------------------------------------------------------------------

    def test_a_paused_rollout_samples_nothing_until_it_resumes(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """`pause` is acknowledged; queued requests wait and are served afterwards."""
        assert _state(rollout) is RolloutState.READY
        rollout.pause()
        assert _state(rollout) is RolloutState.PAUSED
        rollout.pause()
        handle = rollout.submit(asked)
        for _ in range(20):
            assert rollout.poll(handle) == []
        assert not rollout.done(handle)
        rollout.resume()
        assert _state(rollout) is RolloutState.READY
        assert len(self.drain(rollout, handle)) == len(asked)

    def test_a_drained_handle_is_forgotten(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """Polling what was drained, or was never submitted, is an error."""
        handle = rollout.submit(asked)
        self.drain(rollout, handle)
        with pytest.raises(KeyError):
            rollout.poll(handle)
        with pytest.raises(KeyError):
            rollout.poll(RolloutHandle(10**9, 1))

    def test_a_reader_may_leave_after_any_trajectory(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """A stream that is closed, at its last trajectory too, leaves nothing behind."""
        for read in (1, len(asked)):
            stream: Any = rollout.stream(asked)
            for _ in range(read):
                next(stream)
            stream.close()
        assert len(rollout.generate(asked)) == len(asked)

    def test_a_cancelled_request_leaves_the_others_alone(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """Cancel drops one handle's requests; another's come complete."""
        kept, dropped = rollout.submit(asked[:2]), rollout.submit(asked[2:])
        rollout.cancel(dropped)
        with pytest.raises(KeyError):
            rollout.poll(dropped)
        found = {t.records[0].group_id for t in self.drain(rollout, kept)}
        assert found == {request.group_id for request in asked[:2]}

    def test_two_handles_do_not_mix(
        self, rollout: BaseRollout, asked: list[RolloutRequest]
    ) -> None:
        """Each handle gives its own trajectories, also when sampled together."""
        first, second = rollout.submit(asked[:1]), rollout.submit(asked[1:])
        late = {t.records[0].group_id for t in self.drain(rollout, second)}
        early = {t.records[0].group_id for t in self.drain(rollout, first)}
        assert early == {asked[0].group_id}
        assert late == {request.group_id for request in asked[1:]}

    def test_nothing_asked_is_done_at_once(self, rollout: BaseRollout) -> None:
        """An empty submit is no request that never finishes."""
        assert rollout.generate([]) == []

    # -- weights -----------------------------------------------------------------------------------

    def _update(self, make_update: Callable[[int], WeightUpdate] | None, version: int) -> Any:
        if make_update is None:
            pytest.skip("nothing is pushed to this rollout")
        return make_update(version)

    def test_an_update_waits_for_a_pause(
        self, rollout: BaseRollout, make_update: Callable[[int], WeightUpdate] | None
    ) -> None:
        """Weights never change under a running sample."""
        update = self._update(make_update, rollout.weight_version + 1)
        with pytest.raises(RolloutStateError):
            rollout.update(update)

    def test_a_push_binds_what_was_sent_and_carries_its_version(
        self,
        rollout: BaseRollout,
        asked: list[RolloutRequest],
        make_update: Callable[[int], WeightUpdate] | None,
    ) -> None:
        """Bound names equal sent names; versions only grow; trajectories name the version."""
        version = rollout.weight_version + 3
        update = self._update(make_update, version)
        rollout.pause()
        report = rollout.update(update)
        assert sorted(report.bound) == sorted(update.tensors)
        assert report.version == version
        assert report.nbytes > 0
        with pytest.raises(ValueError, match="version"):
            rollout.update(update)
        rollout.resume()
        assert rollout.weight_version == version
        assert {t.weight_version for t in self.sample(rollout, asked)} == {version}

    @pytest.mark.parametrize("wrong", ["missing", "more", "renamed"])
    def test_case_25_a_push_that_does_not_fit_by_name_fails(
        self,
        rollout: BaseRollout,
        make_update: Callable[[int], WeightUpdate] | None,
        wrong: str,
    ) -> None:
        """CASES 25: both lists are named, and the version stays."""
        before = rollout.weight_version
        update = self._update(make_update, before + 1)
        names = list(update.tensors)
        tensors = dict(update.tensors)
        value = tensors[names[0]] if wrong == "more" else tensors.pop(names[0])
        if wrong != "missing":
            tensors["no.such.layer"] = value
        rollout.pause()
        with pytest.raises(WeightMismatchError) as error:
            rollout.update(attrs.evolve(update, tensors=tensors))
        assert (names[0] if wrong == "missing" else "no.such.layer") in str(error.value)
        assert rollout.weight_version == before

    def test_case_31_a_sleeper_is_asked_nothing_before_its_weights_are_back(
        self,
        rollout: BaseRollout,
        asked: list[RolloutRequest],
        make_update: Callable[[int], WeightUpdate] | None,
    ) -> None:
        """CASES 31: asleep or stale, generating is refused; after a push it works."""
        if not self.sleeps:
            with pytest.raises(RolloutStateError):
                rollout.sleep()
            assert _state(rollout) is RolloutState.READY
            return
        update = self._update(make_update, rollout.weight_version + 1)
        rollout.sleep(2)
        assert _state(rollout) is RolloutState.ASLEEP
        with pytest.raises(RolloutStateError):
            rollout.submit(asked)
        rollout.wake()
        rollout.wake()
        assert _state(rollout) is RolloutState.WEIGHTS_STALE
        with pytest.raises(RolloutStateError):
            rollout.submit(asked)
        rollout.pause()
        rollout.update(update)
        rollout.resume()
        assert len(self.sample(rollout, asked)) == len(asked)


def _state(rollout: BaseRollout) -> RolloutState:
    """Asked anew each time: calls between two checks change it."""
    return rollout.state


def _retake(trajectory: Trajectory, step: int, velocity: Velocity, *, score: bool) -> Any:
    """Take one step again from the stored state: scored as stored, or as the Euler step."""
    spec = trajectory.effective
    schedule = spec.schedule()
    index = torch.full((trajectory.rows,), step, dtype=torch.int64)
    sigma, sigma_next = schedule.at(index)
    before = trajectory.state(index)
    with torch.no_grad():
        predicted = velocity(
            before,
            Step(index=index, sigma=sigma),
            trajectory.expanded_conditioning(),
            Guidance.of(spec),
        )
    return reverse_step(
        spec.kind if score else StepKind.ODE,
        before,
        predicted,
        sigma,
        sigma_next,
        sigma_guard=schedule.sigma_guard,
        noise_level=spec.noise_level,
        next_sample=trajectory.state(index + 1) if score else None,
    )


def _borrowed(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Shapes of the tensors that are views of something larger."""
    found: list[tuple[int, ...]] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            found.append(tuple(tensor.shape))
        return tensor

    trajectory.map(look)
    return found
