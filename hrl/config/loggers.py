"""Names of trackers and consoles: the entries of `trainer.logger`."""

JSON_CONSOLE = "console-json"
WITHOUT_TRACKER = ("console", JSON_CONSOLE, "file")
"""Entries of `trainer.logger` that no tracker stands behind: a run is shown and logged in any case."""
LOGGERS = (*WITHOUT_TRACKER, "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
