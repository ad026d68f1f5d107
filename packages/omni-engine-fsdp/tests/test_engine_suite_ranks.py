"""The engine keeps what every engine keeps on two ranks, however they are laid out.

The ranks are started once for this file (`OnRanks`). What two ranks compute is compared with one rank in
test_two_ranks.py and test_parallel_forms.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from omni_core.options import DType, LoRAConfig
from omni_core.testing import OnRanks
from omni_core.testing.on_ranks import IN_RANK
from omni_engine_fsdp import ShardBase, ShardTrained
from tiny_models.sd3 import build_tiny_sd3

sys.path.insert(0, str(Path(__file__).parent))
try:
    import test_engine_suite as one_rank
finally:
    sys.path.pop(0)

CORE = (
    "test_the_gradient_is_that_of_the_objective",
    "test_case_24_the_kl_is_zero_at_first_and_positive_after_a_nudge",
    "test_case_30_a_non_finite_gradient_is_skipped_counted_and_ends_the_run",
)
"""What each layout could break by itself; the rest of the suite is marked slow (`hatch run engine-fsdp:ranks`)."""

SHARD, WHOLE = ShardBase.SHARD, ShardBase.REPLICATE
LORA = LoRAConfig(rank=2, alpha=8.0)


@pytest.fixture(scope="module")
def tiny_sd3() -> Path:
    """One for all ranks: newer transformers write a model on the first rank alone."""
    folder = Path(os.environ[IN_RANK]) / "tiny_sd3"
    if dist.get_rank() == 0:
        build_tiny_sd3(folder)
    dist.barrier()
    return folder


class Laid(OnRanks, one_rank.TestPPODiffusersFSDPEngine):
    """LoRA in float64; a layout names fields of the engine's options."""

    __test__ = False
    pytestmark = pytest.mark.timeout(900)  # the first test waits for all of the file
    dtype = DType.FLOAT64
    gradient_bound = 1e-12

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if IN_RANK in os.environ:
            return
        for name in dir(cls):
            if name.startswith("test") and name not in CORE:
                setattr(cls, name, pytest.mark.slow(getattr(cls, name)))


class TestSharded(Laid):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD}


class TestReplicated(Laid):
    __test__ = True
    layout: ClassVar = {"shard_base": WHOLE, "shard_trained": ShardTrained.REPLICATE}


class TestInTwoCopies(Laid):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD, "replicate": 2}


class TestSequence(Laid):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD, "ulysses": 2}


class TestBranches(Laid):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD, "cfg_parallel": 2}


class AllWeights(Laid):
    lora = None
    untouched = one_rank.TestPPODiffusersFSDPEngineOfAllWeights.untouched


class TestAllWeightsSharded(AllWeights):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD}


class TestAllWeightsReplicated(AllWeights):
    __test__ = True
    layout: ClassVar = {"shard_base": WHOLE, "shard_trained": ShardTrained.REPLICATE}


class TestAllWeightsInTwoCopies(AllWeights):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD, "replicate": 2}


class TestAllWeightsSequence(AllWeights):
    __test__ = True
    # torch picks another product for weights that take gradients than for the reference's; lengths that
    # are cut for two ranks show it in the last bit of a velocity, whose square this is.
    first_kl = 1e-30
    layout: ClassVar = {"shard_base": WHOLE, "ulysses": 2}


class TestAllWeightsBranches(AllWeights):
    __test__ = True
    layout: ClassVar = {"shard_base": SHARD, "cfg_parallel": 2}
