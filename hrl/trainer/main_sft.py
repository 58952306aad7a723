"""`python -m hrl.trainer.main_sft key=value ...`: trains a policy to imitate answers.

With no argument it runs the quickstart: SmolLM2-135M-Instruct learns to answer a sum with its number.
"""

from __future__ import annotations

import sys

from hrl.config.run_kind import SFT
from hrl.trainer.offline.entry import offline_main

if __name__ == "__main__":
    sys.exit(offline_main(SFT))
