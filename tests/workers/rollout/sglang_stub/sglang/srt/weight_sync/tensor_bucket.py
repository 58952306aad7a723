"""Tensors as one run of bytes."""

import torch


class FlattenedTensorBucket:
    def __init__(self, named_tensors=None, flattened_tensor=None, metadata=None):
        self._metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
        self._flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])

    def get_flattened_tensor(self):
        return self._flat

    def get_metadata(self):
        return self._metadata
