"""One driver, many processes: call a method on a group of workers as if it were one object.

The package knows batches (`hrl.protocol.DataProto`), processes and Ray, and nothing of language models. A call passes
`worker_group` → `dispatch` → `rank_processes` → `transport`. `base` and `ray` are doors with verl's names.
"""
