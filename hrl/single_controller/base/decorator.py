"""The names of `verl.single_controller.base.decorator`."""

from hrl.single_controller.decorator import Dispatch, Execute, register

__all__ = ["Dispatch", "Execute", "register"]
