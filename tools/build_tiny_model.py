"""Write the pipeline of random weights that tests and smoke runs of a model family need."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tiny_models import BUILDERS, build_tiny


def main() -> None:
    """Write the pipeline that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(BUILDERS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    print(build_tiny(options.family, options.directory, seed=options.seed, dtype=dtype))


if __name__ == "__main__":
    main()
