"""One driver, many processes: call a method on a group of workers as if it were one object.

The package knows batches (`hrl.protocol.DataProto`) and processes, and nothing of language models. `base` is the
part that any backend shares (workers, dispatch, errors); `ray` is the backend that runs on a Ray cluster.
"""
