"""The names of `verl.single_controller.base`. Nothing in hrl imports from here."""

from hrl.single_controller.base.worker import *  # noqa: F403
from hrl.single_controller.base.worker_group import *  # noqa: F403
