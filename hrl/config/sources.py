"""A source of rows as `data.train_files` and `data.val_files` name it: a text, or a mapping with a path and options."""

from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationError
from pydantic_core import PydanticCustomError

from hrl.config.section import Section
from hrl.nearest import did_you_mean


class SourceConfig(Section):
    """One source of rows."""

    path: str = Field(min_length=1)
    """A file, a folder, a data set of the hub (`openai/gsm8k`), `bundled:…` or `reasoning_gym:…`."""
    name: str | None = None
    """Configuration of a data set of the hub, such as `main`."""
    split: str | None = None
    """Split of a data set of the hub or of a saved one, such as `train` or `train[:10%]`."""
    weight: PositiveFloat | None = None
    """Share of the prompts, in proportion to the other sources' (1 where none is given)."""
    prompt_key: str | None = None
    """Column of this source that holds the prompt."""
    answer_key: str | None = None
    """Column of this source that holds the right answer."""
    map: dict[str, str] = Field(default_factory=dict)
    """Column as hrl names it → column of this source; `a.b` is the field `b` of the column `a`."""
    data_source: str | None = None
    """Name of the source in metrics, which also chooses the built-in reward function; for rows that have none."""
    streaming: bool = False
    """Leave the rows on disk and read each when it is drawn."""


SOURCE_OPTIONS = tuple(SourceConfig.model_fields)


def is_source(value: object) -> bool:
    """Return whether a mapping names a source, and is no row."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("path"), str | PathLike)
        and value.keys() <= set(SOURCE_OPTIONS)
    )


def source_config(value: str | Mapping[str, Any]) -> SourceConfig:
    """Return a source with its options; a text is one without."""
    options = {"path": value} if isinstance(value, str) else dict(value)
    return SourceConfig.model_validate({**options, "path": str(options.get("path", ""))})


def source_title(value: str | Mapping[str, Any]) -> str:
    """Return what a source is called in messages."""
    if isinstance(value, str):
        return value
    parts = [str(value.get("path")), *(str(value[name]) for name in ("name", "split") if value.get(name))]
    return ":".join(parts)


def _one_or_many(value: object) -> object:
    listed = [] if value is None else [value] if isinstance(value, str | Mapping) else value
    for position, item in enumerate(listed if isinstance(listed, list | tuple) else ()):
        if isinstance(item, Mapping):
            _check(position, item)
        elif not isinstance(item, str):
            what = f"[{position}] is {item!r}, expected text."
            raise PydanticCustomError("source", "{what}", {"what": what, "hint": "Or a mapping with a path."})
    return listed


def _check(position: int, item: Mapping[str, Any]) -> None:
    """Refuse a mapping that is no source.

    Raises:
        PydanticCustomError: Its context has `what` is wrong and a `hint`.
    """
    try:
        SourceConfig.model_validate(dict(item))
        return
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    option, hint = ".".join(map(str, detail["loc"])), f"A source has {', '.join(SOURCE_OPTIONS)}."
    if detail["type"] == "extra_forbidden":
        what = f"[{position}] has {option!r}, which is no option of a source."
        hint = did_you_mean(option, SOURCE_OPTIONS, hint)
    elif detail["type"] == "missing":
        what = f"[{position}] has no {option!r}."
    else:
        what, hint = f"[{position}] has {option}={detail['input']!r}: {detail['msg'].lower()}.", ""
    raise PydanticCustomError("source", "{what}", {"what": what, "hint": hint})


SourceList = Annotated[list[str | dict[str, Any]], BeforeValidator(_one_or_many)]
"""A list of sources; a single one is accepted too."""
