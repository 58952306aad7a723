"""The names of `verl.single_controller.base.decorator`."""

from hrl.single_controller.dispatch import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register

__all__ = ["Dispatch", "Execute", "make_nd_compute_dataproto_dispatch_fn", "register"]
