"""The path under which verl's users import `core_algos`; see :mod:`hrl.verl.core_algos`."""

from hrl.verl.core_algos import *  # noqa: F403
