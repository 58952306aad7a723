"""The one error of the weight sync."""


class WeightSyncError(RuntimeError):
    """Weights did not arrive, or not as they were sent. The message names the tensor, the bucket or the receiver."""
