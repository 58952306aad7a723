"""The way of weights from the trainer to the sampler: begin, buckets, commit or abort; verified, versioned, in time.

* `manifest`: which tensors, where their bytes lie, checksums.
* `base`: transports and `WeightSync`, the sending side.
* `receiver`: the receiving side, inside whatever process holds the sampler's weights.
* `shared_memory` (same machine, CPU), `cuda_ipc` (same GPU), `broadcast` (anywhere): the transports.
"""
