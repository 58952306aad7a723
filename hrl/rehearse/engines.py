"""The engines of a rehearsal: what runs on a CPU in place of what a line asks for, as keys of the small run.

Servers belong to somebody, and are not to be given a tiny model's weights; a tiny judge says nothing that makes sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hrl.config.load import load_kind
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.config.section import RM, ROLLOUT, flatten, unflatten
from hrl.preflight.machine_look import arguments_on_cpu
from hrl.rehearse.parts import Change, told

_OF_ENGINE, _OF_SERVER, _FUNCTIONS = f"{ROLLOUT}.engine_kwargs", f"{RM}.server_kwargs", "reward.functions"
_DTYPE = f"{ROLLOUT}.dtype"
_DIGIT: dict[str, Any] = {"pattern": "([0-9])", "low": 0, "high": 9, "max_tokens": 4}
"""Arguments of a judge that says one digit, as a random model can be made to."""


def keys_of_engine(name: str) -> dict[str, Any]:
    """Return the keys of an engine of the run's own, with nothing of the line's."""
    return {f"{ROLLOUT}.name": name, _OF_ENGINE: {}, f"{ROLLOUT}.server.urls": []}


def with_engine(kind: RunKind[Any], small: RunConfiguration, engine: str) -> RunConfiguration:
    """Return a small run that samples by another engine, of one process each."""
    values = dict(flatten(small.model_dump(), kind.schema)) | keys_of_engine(engine)
    return load_kind(kind, unflatten(values | {f"{ROLLOUT}.tensor_model_parallel_size": 1}))


def run_by_vllm_here(values: dict[str, Any], config: PPOTrainerConfig) -> Iterator[Change]:
    """Give vLLM, as the engine and as the server of a reward model, no argument with which it does not run on a CPU.

    Args:
        values: Keys of the small run, which are changed.
        config: The configuration of the line.
    """
    own = values[_OF_ENGINE].get("vllm")
    if own:
        values[_OF_ENGINE] = {**values[_OF_ENGINE], "vllm": arguments_on_cpu(own)}
        yield from _changed(f"{_OF_ENGINE}.vllm", own, values[_OF_ENGINE]["vllm"])
        if own.get("quantization") is not None and values[_DTYPE] == "auto":  # float32 on most CPUs
            values[_DTYPE] = "bfloat16"
            yield Change(_DTYPE, "auto", "bfloat16: vLLM rounds weights of 16 bits")
    if config.reward.reward_model.is_served:
        given = values[_OF_SERVER]
        values[_OF_SERVER] = arguments_on_cpu(given)
        yield from _changed(_OF_SERVER, given, values[_OF_SERVER])


def _changed(key: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    for name, value in before.items():
        if name not in after:
            yield Change(f"{key}.{name}", told(value), "left out: vLLM does not run it on a CPU")
        elif after[name] != value:
            yield Change(f"{key}.{name}", told(value), f"{told(after[name])}, which vLLM runs on a CPU")


def shrink_server(values: dict[str, Any], degree: int) -> Iterator[Change]:
    """Have a reward model served by fewer devices, and the library's judge say something that can be read.

    Args:
        values: Keys of the small run, which are changed.
        degree: Devices that share a copy of it.
    """
    if "tensor_parallel_size" in values[_OF_SERVER]:
        values[_OF_SERVER] = {**values[_OF_SERVER], "tensor_parallel_size": degree}
    asked = [dict(entry) for entry in values[_FUNCTIONS] or ()]
    for entry in asked:
        if entry.get("name") == "judge" and "base_url" not in entry["kwargs"]:
            options = {**entry["kwargs"].get("options", {}), "structured_outputs": {"regex": "[0-9]"}}
            entry["kwargs"] = {**entry["kwargs"], **_DIGIT, "options": options}
            yield Change(f"{_FUNCTIONS}, judge", "what it says", "one digit: a random model grades nothing")
    values[_FUNCTIONS] = asked or values[_FUNCTIONS]
