"""What every engine and every rollout has to agree on for a model family: its conditioning record.

The parts that compute (Denoiser, Conditioner, Codec) are in the packages that have the libraries for
them; a record is here so that whoever encodes and whoever trains need not know each other.
"""
