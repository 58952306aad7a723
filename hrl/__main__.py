"""`python -m hrl` is the console script `hrl`."""

from __future__ import annotations

import sys

from hrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
