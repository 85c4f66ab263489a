"""``python -m benchmarks.netlab``, from the repository's root."""

import sys

from .cli import main

sys.exit(main())
