"""One driver, many processes: call a method on a group of workers as if it were one object.

The package deals with batches (`hrl.protocol.DataProto`), processes and Ray, not with language models. A call passes
`worker_group` → `dispatch` → `rank_processes` → `transport` → `rank_process`, where the worker is; `packing` lays
batches out. `base` and `ray` export verl's names.
"""
