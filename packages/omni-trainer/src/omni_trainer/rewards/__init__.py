"""Rewards that ship with the trainer, and what scores with any reward."""
