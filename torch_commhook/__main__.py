"""``python -m torch_commhook``: the command line of the library."""

import sys

from torch_commhook.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
