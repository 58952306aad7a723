"""The path under which verl's users import `core_algos`; see `hrl.verl.core_algos`."""

from hrl.verl.core_algos import *  # noqa: F403
