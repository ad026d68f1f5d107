"""Recipes: short YAML files that say only what differs from the defaults."""
