"""One module for each algorithm; its docstring is the mathematics and its source."""
