"""`python -m hrl.trainer.main_ppo key=value ...`: trains a policy with PPO, GRPO and their relatives.

With no argument it runs the quickstart: GRPO teaches SmolLM2-135M-Instruct to add, on whatever machine this is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hrl.config import ConfigError, compose_cli

if TYPE_CHECKING:
    from hrl.trainer.ppo.ray_trainer import RayPPOTrainer

EXIT_CONFIG = 2


def main(argv: list[str] | None = None, trainer_cls: type[RayPPOTrainer] | None = None) -> int:
    """Composes the configuration, then trains.

    Args:
        argv: Overrides like `algorithm.adv_estimator=rloo`; the command line's if `None`.
        trainer_cls: A subclass of `RayPPOTrainer` to run in its place.

    Returns:
        The exit status: 0 for success, 2 for a configuration that cannot work.
    """
    try:
        config = compose_cli(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    # Only now: a wrong key is reported before torch and ray are imported.
    from hrl.trainer.run import run_training

    return run_training(config, trainer_cls)


if __name__ == "__main__":
    sys.exit(main())
