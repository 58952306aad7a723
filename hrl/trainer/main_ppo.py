"""`python -m hrl.trainer.main_ppo key=value ...`: train a policy with PPO, GRPO and their relatives.

Without arguments it runs the quickstart: GRPO teaches SmolLM2-135M-Instruct to add, on whatever machine this is.
"""

import sys
from functools import partial

from hrl.trainer.entry import train

main = partial(train, "ppo")

if __name__ == "__main__":
    sys.exit(main())
