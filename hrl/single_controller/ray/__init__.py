"""The names of `verl.single_controller.ray`, which are those of its `base`. Nothing in hrl imports from here."""

from hrl.single_controller.ray.base import *  # noqa: F403
