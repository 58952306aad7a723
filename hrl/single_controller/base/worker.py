"""The names of `verl.single_controller.base.worker`."""

from hrl.single_controller.worker import Worker

__all__ = ["Worker"]
