"""`python -m omni_trainer` is the `omni` command, for launchers that take a module."""

import sys

from omni_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
