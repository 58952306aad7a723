"""Procedural tasks of the package reasoning-gym: `reasoning_gym:<dataset>?size=1000&seed=1&<parameter>=<value>`.

Rows are generated from the seed. Each has its whole entry as the ground truth, and the dataset's own scorer scores the
answer (`hrl.reward.scorers.reasoning_gym`). Several generators iterate over sets of strings, whose order differs
between processes, so the rows are generated in a child process with a fixed hash seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from hrl.errors import DatasetError
from hrl.processes.child_environment import child_environment
from hrl.processes.plain_data import from_plain, to_plain

DATA_SOURCE_PREFIX = "reasoning_gym/"
_DEFAULT_SIZE = 1000
_DEFAULT_SEED = 1
_INSTRUCTION = "\n\nWrite your final answer between <answer> and </answer>."


def reasoning_gym_rows(address: str, *, timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """Return the rows of `<dataset>?size=…&seed=…&…`, the same in every process and on every machine.

    Raises:
        DatasetError: The dataset is unknown, has no such parameter, refuses a value, or takes too long.
    """
    name, parameters = parse_address(address)
    command = [sys.executable, "-W", "ignore", "-m", "hrl.data.tasks.reasoning_gym", address]
    environment = child_environment(PYTHONHASHSEED="0")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DatasetError(f"'reasoning_gym:{address}' was not made within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DatasetError(f"can't make 'reasoning_gym:{address}': {reason[-1] if reason else done.returncode}")
    entries = (from_plain(json.loads(line)) for line in done.stdout.decode("utf-8").splitlines())
    return (_row(name, parameters, index, entry) for index, entry in enumerate(entries))


def parse_address(address: str) -> tuple[str, dict[str, Any]]:
    """Split `chain_sum?size=10&max_terms=3` into the name and the parameters; values are JSON or plain strings."""
    name, _, query = address.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise DatasetError(f"'reasoning_gym:{address}' is not <dataset>?name=value&name=value: {error}") from error
    return name, {"size": _DEFAULT_SIZE, "seed": _DEFAULT_SEED} | {key: _value(text) for key, text in pairs}


def create_dataset(name: str, parameters: Mapping[str, Any]) -> Any:
    """Create a `reasoning_gym` dataset.

    Raises:
        DatasetError: The package is missing, or the dataset or its parameters are wrong.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(f"'reasoning_gym:{name}' needs a package: pip install reasoning-gym ({error})") from error
    if name not in DATASETS:
        raise DatasetError(f"reasoning-gym has no dataset {name!r}; it has: {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, **parameters)
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetError(f"reasoning-gym's {name} refuses {dict(parameters)}: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _row(name: str, parameters: Mapping[str, Any], index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE_PREFIX + name,
        "prompt": [{"role": "user", "content": entry["question"] + _INSTRUCTION}],
        "reward_model": {"style": "rule", "ground_truth": entry},
        "extra_info": {"index": index, "parameters": dict(parameters)},
    }


def _main(address: str) -> None:
    """Write the entries of `address` to stdout, one JSON object a line."""
    dataset = create_dataset(*parse_address(address))
    for index in range(len(dataset)):
        sys.stdout.write(json.dumps(to_plain(dataset[index], "entry")) + "\n")


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except DatasetError as error:
        sys.exit(str(error))
