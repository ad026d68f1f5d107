"""The road of pushed weights from a rank to the processes that hold a rollout: a bucket at a time.

The sender fills buckets of the kind that the road takes; the inbox, beside the rollout, keeps them until
the next push of the same adapter, and hands them to the rollout as one update.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from omni_core.options import WeightTransport
from omni_core.rollout import BaseRollout, UpdateReport, WeightUpdate
from omni_core.weight_buckets import (
    AnyBucket,
    Bucket,
    BucketedWeights,
    BucketStore,
    DeviceBucket,
    DeviceStore,
    PackedBucket,
    PackedStore,
    WeightStore,
)

MIB = 2**20

_STORES: dict[WeightTransport, type[WeightStore]] = {
    WeightTransport.SHARED_MEMORY: BucketStore,
    WeightTransport.OBJECT_STORE: PackedStore,
    WeightTransport.CUDA_IPC: DeviceStore,
}


def choose(asked: WeightTransport, *, one_machine: bool) -> WeightTransport:
    """Choose the road; `auto` never takes `cuda_ipc`, which is not tested.

    Args:
        asked: `rollout.transport`.
        one_machine: The sender and every receiver are on one machine.

    Raises:
        ValueError: a road that ends at the machine's border was asked for, and they are on several.
    """
    if asked is WeightTransport.AUTO:
        return WeightTransport.SHARED_MEMORY if one_machine else WeightTransport.OBJECT_STORE
    if not one_machine and asked is not WeightTransport.OBJECT_STORE:
        msg = (
            f"rollout.transport: {asked.value} reaches one machine, and the rollout's servers are not "
            f"all on that of rank 0; take {WeightTransport.AUTO.value} or "
            f"{WeightTransport.OBJECT_STORE.value}"
        )
        raise ValueError(msg)
    return asked


class WeightSender:
    """Rank 0's end: buckets of each adapter, until its next push."""

    def __init__(self, transport: WeightTransport, *, bucket_mib: int) -> None:
        self.transport = transport
        self._bytes = bucket_mib * MIB
        self._stores: dict[str | None, WeightStore] = {}

    def buckets(self, update: WeightUpdate) -> Iterator[AnyBucket]:
        """Fill and yield them, one after the other."""
        if update.adapter not in self._stores:
            self._stores[update.adapter] = _STORES[self.transport](bucket_bytes=self._bytes)
        yield from self._stores[update.adapter].write(update.tensors)

    def close(self) -> None:
        """Let go of everything."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


@attrs.frozen(kw_only=True)
class PushHeader:
    """What an update is, apart from its tensors."""

    version: int
    adapter: str | None
    alpha_over_rank: float | None

    @classmethod
    def of(cls, update: WeightUpdate) -> PushHeader:
        """Take the tensors away."""
        return cls(
            version=update.version,
            adapter=update.adapter,
            alpha_over_rank=update.alpha_over_rank,
        )


class WeightInbox:
    """The rollout's end."""

    def __init__(self, rollout: BaseRollout, *, bucket_mib: int) -> None:
        self._rollout = rollout
        self._bytes = bucket_mib * MIB
        self._arrived: list[AnyBucket] = []
        self._copies: dict[str | None, BucketStore] = {}

    def begin(self, header: PushHeader) -> None:
        """Make room: what was pushed of this adapter before is let go of."""
        self._arrived = []
        if header.adapter in self._copies:
            self._copies[header.adapter].clear()

    def take(self, header: PushHeader, bucket: AnyBucket) -> None:
        """Keep a bucket; one that came as an object is copied to shared memory, and the object freed."""
        if isinstance(bucket, PackedBucket):
            store = self._copies.setdefault(header.adapter, BucketStore(bucket_bytes=self._bytes))
            bucket = store.copy(bucket)
        assert isinstance(bucket, Bucket | DeviceBucket)
        self._arrived.append(bucket)

    def finish(self, header: PushHeader) -> UpdateReport:
        """Let the rollout bind what came.

        Raises:
            RolloutStateError, WeightMismatchError, ValueError: as `BaseRollout.update`.
        """
        arrived, self._arrived = self._arrived, []
        return self._rollout.update(
            WeightUpdate(
                version=header.version,
                tensors=BucketedWeights(arrived),
                adapter=header.adapter,
                alpha_over_rank=header.alpha_over_rank,
            )
        )

    def close(self) -> None:
        """Let go of everything."""
        for store in self._copies.values():
            store.close()
        self._copies.clear()
