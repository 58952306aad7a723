"""Weights from the trainer to the sampler: begin, buckets, commit or abort; verified, versioned, under a deadline.

* `wire`: what both ends agree on: manifest, buckets, checksums, reports.
* `sender`: `WeightSync`, the trainer's end.
* `receiver`: `WeightReceiver`, in the process that holds the sampler's weights.
* `shared_memory` (same machine, CPU), `cuda_ipc` (same GPU), `broadcast` (anywhere): the transports, both ends of each.
* `tensor_parallel`: several trainer ranks that send to one tensor-parallel engine.
"""
