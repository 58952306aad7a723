"""How long copies of the parameters in the dtype of products are kept."""

from __future__ import annotations

import torch


def keeps_cast_parameters(num_ranks: int, device: torch.device, reshard_after_forward: bool) -> bool:
    """Return whether the parameters' copies in the compute dtype are kept from one forward to the next."""
    # With several ranks, keeping them would mean holding the whole model. A single rank only casts. On a CPU that takes
    # as long as reading the weights, and there is memory; a GPU casts in no time, and the copies are large.
    return num_ranks == 1 and (device.type == "cpu" or not reshard_after_forward)
