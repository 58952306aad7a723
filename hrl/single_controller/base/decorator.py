"""The names of `verl.single_controller.base.decorator`."""

from hrl.single_controller.dispatch import Dispatch, Execute, register

__all__ = ["Dispatch", "Execute", "register"]
