"""`python -m hrl.trainer.main_dpo key=value ...`: train a policy on pairs of answers, of which one is preferred.

Without arguments it runs the quickstart: SmolLM2-135M-Instruct learns to prefer right sums to wrong ones.
"""

import sys
from functools import partial

from hrl.trainer.entry import train

main = partial(train, "dpo")

if __name__ == "__main__":
    sys.exit(main())
