"""`python -m hrl.trainer.main_rm key=value ...`: train a reward model on pairs of answers.

Without arguments it runs the quickstart: SmolLM2-135M-Instruct gets a head that tells right sums from wrong ones.
"""

import sys
from functools import partial

from hrl.trainer.entry import train

main = partial(train, "rm")

if __name__ == "__main__":
    sys.exit(main())
