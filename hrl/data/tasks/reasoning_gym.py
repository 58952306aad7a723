"""Procedural tasks of the package reasoning-gym: `reasoning_gym:<dataset>?size=1000&seed=1&<parameter>=<value>`.

Rows are generated from the seed. Each has its whole entry as the ground truth, and the dataset's own scorer scores the
answer (`hrl.reward.scorers.reasoning_gym`). Several generators iterate over sets of strings, whose order differs
between processes, so the rows are generated in a child process with a fixed hash seed.

Besides parameters of the dataset, an address takes options of hrl (`OPTIONS`): how answers are written, and how hard
the questions are. Without `level` they are those of the first level of the dataset's own curriculum, which suit small
models; `level=null` stands for the parameters that the package itself would take.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrl.data.tasks.answer_format import PLAIN, AnswerFormat, chat, format_info, options_in, take_format, take_shots
from hrl.errors import DatasetError
from hrl.nearest import did_you_mean
from hrl.processes.child_environment import child_environment
from hrl.processes.plain_data import from_plain, to_plain

DATA_SOURCE_PREFIX = "reasoning_gym/"
OPTIONS: Mapping[str, str] = {
    "answer": "plain, tags or boxed: how the answer is to be written",
    "format_credit": "score of a wrong answer in tags or in a box",
    "level": "of the dataset's curriculum, from 0; null for the package's own parameters",
    "shots": "solved examples before the question",
    "size": "rows",
    "seed": "other rows",
}
"""What an address takes beside the dataset's parameters."""
_DEFAULT_SIZE = 1000
_DEFAULT_SEED = 1
_SEEDS_APART = 10_000_019
_FIRST_LEVEL = 0
_SEARCHES_FOR_MINUTES = ("sokoban",)
"""Datasets whose first level is too narrow: four boxes and more in a room of 6 × 6 are searched for, at random."""
_SHOTS_SEED = 1_000_003
"""Added to the seed of the rows for the examples, so that no row is its own example."""


@dataclass(frozen=True)
class Address:
    """What `<dataset>?…` asks for.

    Attributes:
        text: The address.
        name: The dataset.
        form: How answers are written.
        credit: Score of a wrong answer in that format.
        level: Level of the curriculum; None for the package's own parameters.
        is_level_given: Whether the address names it.
        shots: Number of solved examples.
        parameters: Parameters of the dataset that the address gives, with size and seed.
    """

    text: str
    name: str
    form: AnswerFormat = PLAIN
    credit: float = 0.0
    level: int | None = _FIRST_LEVEL
    is_level_given: bool = False
    shots: int = 0
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def reasoning_gym_rows(address: str, *, timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """Return the rows of `<dataset>?size=…&seed=…&…`, the same in every process and on every machine.

    Raises:
        DatasetError: The dataset is unknown, has no such parameter, refuses a value, or takes too long.
    """
    parse_address(address)
    command = [sys.executable, "-W", "ignore", "-m", "hrl.data.tasks.reasoning_gym", address]
    environment = child_environment(PYTHONHASHSEED="0")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DatasetError(f"'reasoning_gym:{address}' was not made within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DatasetError(f"can't make 'reasoning_gym:{address}': {reason[-1] if reason else done.returncode}")
    return (from_plain(json.loads(line)) for line in done.stdout.decode("utf-8").splitlines())


def rows_made_here(address: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in this process; those of some datasets are others in every process.

    Raises:
        DatasetError: As `reasoning_gym_rows`.
    """
    asked = parse_address(address)
    if asked.name not in datasets():
        create_dataset(asked.name, {})  # says what there is
    parameters = parameters_at(asked)
    dataset = create_dataset(asked.name, parameters)
    examples: list[tuple[str, str]] = []
    if asked.shots:
        others = parameters | {"seed": parameters["seed"] + _SHOTS_SEED, "size": asked.shots + 1}
        examples = [(one["question"], one["answer"]) for one in create_dataset(asked.name, others)]
    for index in range(len(dataset)):
        yield _row(asked, parameters, examples, index, dataset[index])


def parse_address(address: str) -> Address:
    """Read `chain_sum?size=10&answer=tags&max_terms=3`; values are JSON or plain strings.

    Raises:
        DatasetError: It is no address, or an option has a value that it can't have.
    """
    name, _, query = address.partition("?")
    text = f"reasoning_gym:{address}"
    given = options_in(query, text)
    is_level_given = "level" in given
    form, credit = take_format(given, text)
    level, shots = given.pop("level", _FIRST_LEVEL), take_shots(given, form, text)
    if not (level is None or _is_count(level)):
        raise DatasetError(f"level={level} in {text!r} must be a number from 0, or null for no level")
    parameters = {"size": _DEFAULT_SIZE, "seed": _DEFAULT_SEED} | given
    return Address(address, name, form, credit, level, is_level_given, shots, parameters)


def _far_apart(seed: Any) -> dict[str, Any]:
    """Return a seed that shares no rows with another seed's.

    reasoning-gym draws row `i` with `seed + i`: of seeds 1 and 2, row 1 and row 0 would be the same, and held-out rows
    rows of the training.
    """
    if not _is_count(seed) or seed == _DEFAULT_SEED:  # whose rows are the package's own
        return {}
    return {"seed": (seed or 1) * _SEEDS_APART}


def create_dataset(name: str, parameters: Mapping[str, Any]) -> Any:
    """Create a `reasoning_gym` dataset.

    Raises:
        DatasetError: The package is missing, or the dataset or its parameters are wrong.
    """
    known = datasets()
    if name not in known:
        hint = did_you_mean(name, known, "`hrl tasks` lists them.")
        raise DatasetError(f"reasoning-gym has no dataset {name!r}. {hint}")
    unknown = [parameter for parameter in parameters if parameter not in parameters_of(name)]
    if unknown:
        there = [*OPTIONS, *(one for one in parameters_of(name) if one not in OPTIONS)]
        hint = did_you_mean(unknown[0], there, f"There are {', '.join(there)}.")
        raise DatasetError(f"{name} has no parameter {unknown[0]!r}. {hint}")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **{**parameters, **_far_apart(parameters.get("seed"))})
    except (TypeError, ValueError, AssertionError) as error:
        shown = {key: value for key, value in parameters.items() if key not in ("size", "seed")}
        raise DatasetError(f"{name} refuses {shown}: {error}") from error


def datasets() -> list[str]:
    """Return the names of all datasets.

    Raises:
        DatasetError: The package is missing.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(f"tasks of reasoning_gym: need a package: pip install reasoning-gym ({error})") from error
    return sorted(DATASETS)


def about(name: str) -> str:
    """Return what the package says of a dataset, in a line; empty if it says nothing."""
    from reasoning_gym.factory import DATASETS

    return " ".join(inspect.cleandoc(DATASETS[name][0].__doc__ or "").partition("\n\n")[0].split())


def parameters_of(name: str) -> dict[str, Any]:
    """Return the parameters of a dataset with the package's defaults."""
    from reasoning_gym.factory import DATASETS

    config = DATASETS[name][1]
    return {field.name: _default_of(field) for field in dataclasses.fields(config)}


def parameters_at(asked: Address) -> dict[str, Any]:
    """Return what a dataset is made with: the values of the level, and those of the address on top.

    Without `level`, a dataset that has no curriculum, or whose first level makes no rows in a reasonable time, has the
    package's values.

    Raises:
        DatasetError: The address names a level, and the dataset has none.
    """
    from reasoning_gym.factory import CURRICULA, create_curriculum

    given = dict(asked.parameters)
    if asked.level is None or asked.name not in CURRICULA:
        if asked.is_level_given and asked.level is not None:
            raise DatasetError(f"{asked.name} has no curriculum, so it has no level={asked.level}")
        return given
    curriculum = create_curriculum(asked.name)
    curriculum.set_global_level(asked.level)
    config = curriculum.generate_configuration()
    names = [
        field
        for one in curriculum.attributes.values()
        for field in (getattr(one, name, None) for name in ("field_name", "lower_field_name", "upper_field_name"))
        if field is not None
    ]
    of_level = {name: getattr(config, name) for name in names}
    is_usable = asked.name not in _SEARCHES_FOR_MINUTES and _is_valid(config)
    return of_level | given if asked.is_level_given or is_usable else given


def _is_valid(config: Any) -> bool:
    try:
        getattr(config, "validate", lambda: None)()
    except (AssertionError, ValueError):
        return False
    return True


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _row(
    asked: Address,
    parameters: Mapping[str, Any],
    examples: Sequence[tuple[str, str]],
    index: int,
    entry: dict[str, Any],
) -> dict[str, Any]:
    shown = [example for example in examples if example[0] != entry["question"]][: asked.shots]
    return {
        "data_source": DATA_SOURCE_PREFIX + asked.name,
        "prompt": chat(entry["question"], asked.form, shown),
        "answer": entry["answer"],
        "reward_model": {"style": "rule", "ground_truth": entry},
        "extra_info": {
            "index": index,
            "parameters": dict(parameters),
            **format_info(asked.form, asked.credit),
        },
    }


def _main(address: str) -> None:
    """Write the rows of `address` to stdout, one JSON object a line."""
    for row in rows_made_here(address):
        sys.stdout.write(json.dumps(to_plain(row, "row")) + "\n")


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except DatasetError as error:
        sys.exit(str(error))
