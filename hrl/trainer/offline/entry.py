"""What the entry points of the offline trainers do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hrl.config import ConfigError
from hrl.config.compose import compose_kind
from hrl.config.run_kind import RunKind

if TYPE_CHECKING:
    from hrl.trainer.offline.trainer import OfflineTrainer

EXIT_CONFIG = 2


def offline_main(
    kind: RunKind[Any], argv: list[str] | None = None, trainer_cls: type[OfflineTrainer] | None = None
) -> int:
    """Composes the configuration, then trains.

    Args:
        kind: Of the run.
        argv: Overrides like `algorithm.beta=0.2`; the command line's if `None`.
        trainer_cls: A subclass of the kind's trainer to run in its place.

    Returns:
        The exit status: 0 for success, 2 for a configuration that cannot work.
    """
    try:
        config = compose_kind(kind, sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    # Only now: a wrong key is reported before torch and ray are imported.
    from hrl.trainer.offline.run import run_offline

    return run_offline(kind, config, trainer_cls)
