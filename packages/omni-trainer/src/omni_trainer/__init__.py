"""Workers, training loops, rewards, data, tracking and the `omni` command."""
