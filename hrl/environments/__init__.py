"""What a policy acts in: the interface of an environment, and those that come with hrl."""

from hrl.environments.interface import Action, Environment, EnvironmentReplyError, Observation, StepResult, ToolCall

__all__ = ["Action", "Environment", "EnvironmentReplyError", "Observation", "StepResult", "ToolCall"]
