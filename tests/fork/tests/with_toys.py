"""`omni` in a process that knows the toy family, which no entry point offers."""

import sys

from omni_core.testing.toys import register_toys
from omni_trainer.cli import main

if __name__ == "__main__":
    register_toys()
    sys.exit(main(sys.argv[1:]))
