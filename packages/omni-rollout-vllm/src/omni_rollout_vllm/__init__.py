"""The rollout `vllm_omni`: samples in the vLLM-Omni diffusion engine, on GPUs and on CPU.

Importing this package loads neither torch nor vLLM; `omni_rollout_vllm.rollout` has the rollout, and
`omni_rollout_vllm.upstream` says which versions of the engine it works with.
"""
