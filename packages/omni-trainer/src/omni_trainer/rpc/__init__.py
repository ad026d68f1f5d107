"""Workers on Ray: the only place that knows it."""
