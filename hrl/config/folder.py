"""Where the YAML tree of hrl lies."""

from functools import cache
from importlib import resources
from pathlib import Path


@cache
def config_folder() -> Path:
    """Return the folder of `ppo_trainer.yaml`: inside the installed package, or at the root of the repository.

    Raises:
        FileNotFoundError: Neither is there; the installation is broken.
    """
    package = Path(str(resources.files("hrl")))
    candidates = (package / "_configs", package.parent / "configs")
    for candidate in candidates:
        if (candidate / "ppo_trainer.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"no ppo_trainer.yaml in {' or '.join(map(str, candidates))}; install hrl again")
