"""One rank of test_optimizer.py: saves moments of 8 bits, and loads those that one rank saved.

`python eight_bit.py MODEL OUT WIDTH...`, the last the ranks of a LoRA, one after another.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import ranks

from omni_core.options import LoRAConfig, OptimizerKind
from omni_engine_fsdp import ShardBase


def main(model: Path, out: Path, width: int) -> None:
    """Save after a step, load what one rank saved, and take a step."""
    rank = dist.get_rank()
    options: dict[str, Any] = {
        "shard": ShardBase.SHARD,
        "lora": LoRAConfig(rank=width, alpha=128.0),
        "optimizer": attrs.evolve(ranks.LR, kind=OptimizerKind.ADAMW_8BIT),
    }
    saver, loader = (ranks.build(model, **options) for _ in range(2))
    saver.train_batch(ranks.rows(ranks.MINE[rank]), ranks.loss)
    state = saver.save_checkpoint(out / f"two-{width}")
    loader.load_checkpoint(
        out / f"one-{width}", json.loads((out / f"one-{width}.json").read_text())
    )
    found = {"two": ranks.moments(saver), "back": ranks.moments(loader)}
    loader.train_batch(ranks.rows(ranks.MINE[rank]), ranks.loss)
    if rank == 0:
        (out / f"two-{width}.json").write_text(json.dumps(state))
        for name, moments in found.items():
            kept = {key: value.contiguous() for key, value in moments.items()}
            save_file(kept, out / f"{name}-{width}.safetensors")


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    for width in map(int, sys.argv[3:]):
        main(Path(sys.argv[1]), Path(sys.argv[2]), width)
    dist.barrier()
    dist.destroy_process_group()
    # FSDP2's reference cycles keep gloo's threads; alive at exit, they abort the process now and then.
    gc.collect()
