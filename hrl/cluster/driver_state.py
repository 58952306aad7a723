"""Of what kind the parts of a driver's state in a checkpoint are: `state.json` may come from anywhere.

Each part may be missing, as in checkpoints of older versions of hrl. What a sampler of the user's own keeps is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hrl.processes.plain_data import first_problem
from hrl.report.run_folder import DamagedFileError, is_number

#: Levels of lists and objects in each other; no run has as many, and whatever walks through them has to end.
_DEEPEST = 100


def _a_number(value: Any) -> Any:
    if not is_number(value):
        raise ValueError("it is no number that a float holds")
    return value


_Number = Annotated[Any, AfterValidator(_a_number)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    """A part of the state; a default only says that it may be missing, as in checkpoints of older versions of hrl."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Position(_Part):
    epoch: _Count
    offset: _Count


class _Data(_Part):
    columns: dict[str, Any] = {}


class _Inputs(_Part):
    kind: str = ""
    models: dict[str, str] = {}
    tokenizer: str = ""
    code: dict[str, str] = {}
    versions: dict[str, Any] = {}


class _State(_Part):
    step: _Count
    data_position: _Position = _Position(epoch=0, offset=0)
    data: _Data = _Data()
    contents: list[str] = []
    score: _Number | None = None
    config: dict[str, Any] = {}
    inputs: _Inputs = _Inputs()
    ranks: dict[str, _Count] = {}
    kl_coef: _Number = 0.0
    drift_gate_closed: bool = False
    nonfinite_in_a_row: _Count = 0
    reward_shaping: dict[str, dict[str, _Number]] = {}


def check_kinds(file: Path, state: Mapping[str, Any]) -> None:
    """Refuse a state with a part that is not of its kind.

    Args:
        file: It was read from.
        state: The JSON object in it.

    Raises:
        DamagedFileError: Names the file and the part.
    """
    if _is_deeper(state, _DEEPEST):
        raise DamagedFileError(f"{file} is damaged: more than {_DEEPEST} lists and objects are nested in each other")
    try:
        _State.model_validate(state)
    except ValidationError as error:
        raise DamagedFileError(f"{file} is damaged: {first_problem(error)}") from error


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for outer in layer
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(layer)
