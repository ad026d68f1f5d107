"""What the entry points name. Importing this imports neither torch nor the implementations."""

from __future__ import annotations

from omni_core import NoOptions, Plugin
from omni_fork_example.options import DDPOptions, RednessOptions, ReinforceOptions

ddp = Plugin(
    api=1,
    options=DDPOptions,
    target="omni_fork_example.ddp:DDPEngine",
    devices=("cpu",),
    summary="DistributedDataParallel over the toy family",
)
redness = Plugin(
    api=1,
    options=RednessOptions,
    target="omni_fork_example.redness:Redness",
    summary="how red a picture is",
)
reinforce = Plugin(
    api=1,
    options=ReinforceOptions,
    target="omni_fork_example.reinforce:Reinforce",
    summary="REINFORCE with the group's mean as baseline",
)
tiny = Plugin(
    api=1,
    options=NoOptions,
    target="omni_fork_example.recipe:tiny",
    summary="two steps of fork_reinforce on the tiny signs",
)
