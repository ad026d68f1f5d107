"""FSDP2 engines for diffusers models: LoRA, checkpoints, model families, engine-side rollout."""
