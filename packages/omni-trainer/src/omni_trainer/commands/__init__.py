"""What the commands of `omni` do; each module is imported when its command runs."""
