"""vLLM-Omni on machines without an accelerator: a platform of its own, where vLLM runs on CPU."""
