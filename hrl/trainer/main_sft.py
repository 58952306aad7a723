"""`python -m hrl.trainer.main_sft key=value ...`: train a policy to imitate answers.

Without arguments it runs the quickstart: SmolLM2-135M-Instruct learns to answer a sum with its number.
"""

import sys
from functools import partial

from hrl.trainer.entry import train

main = partial(train, "sft")

if __name__ == "__main__":
    sys.exit(main())
