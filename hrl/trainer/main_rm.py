"""`python -m hrl.trainer.main_rm key=value ...`: trains a reward model on pairs of answers.

With no argument it runs the quickstart: SmolLM2-135M-Instruct gets a head that tells right sums from wrong ones.
"""

from __future__ import annotations

import sys

from hrl.config.run_kind import RM
from hrl.trainer.offline.entry import offline_main

if __name__ == "__main__":
    sys.exit(offline_main(RM))
