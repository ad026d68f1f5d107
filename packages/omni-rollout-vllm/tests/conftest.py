"""tests/engine needs vLLM-Omni itself: `hatch run vllm:test` runs it, this package's own tests do not."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm_omni") else ["engine"]
