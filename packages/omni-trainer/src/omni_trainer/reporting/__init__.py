"""What a run shows people: metrics, progress, plots, grids and intervals."""
