"""`python -m hrl.trainer.main_dpo key=value ...`: trains a policy on pairs of answers, of which one is preferred.

With no argument it runs the quickstart: SmolLM2-135M-Instruct learns to prefer right sums to wrong ones.
"""

from __future__ import annotations

import sys

from hrl.config.run_kind import DPO
from hrl.trainer.offline.entry import offline_main

if __name__ == "__main__":
    sys.exit(offline_main(DPO))
