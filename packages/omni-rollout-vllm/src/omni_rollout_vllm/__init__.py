"""The vLLM-Omni rollout: this package holds its name and pins; no plugin is offered yet."""
