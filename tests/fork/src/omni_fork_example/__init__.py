"""A reward, an algorithm and a recipe that a stranger's package adds to omni."""
