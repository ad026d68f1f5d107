"""Test support that ships with the contracts: toys that keep them all, and suites that check a plugin.

`omni_core.testing.toys` is a whole model family, engine, rollout and reward in plain torch that trains in
milliseconds. The suites need pytest (`pip install "omni-core[testing]"`); the toys do not, and nothing
in omni_core outside this package imports either.
"""
