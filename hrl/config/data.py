"""`data.*`: which rows are trained on, and how they become prompts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from hrl.config.section import Get, MinusOneOrMore, Section, Unit, follows, section
from hrl.config.sources import SourceList


class CustomClassConfig(Section):
    """`data.custom_cls`: a data set class of your own."""

    path: str | None = None
    """Python file that defines the data set class; null uses `hrl.data.dataset.RLHFDataset`."""
    name: str | None = None
    """Name of the class inside that file."""


def held_out_beside(name: str) -> str:
    """Return the name of the bundled validation rows that belong to bundled training rows."""
    return name.removesuffix("/train") + "/val"


def _val_files_beside(get: Get) -> object:
    """Return the bundled validation rows that belong to bundled training rows; empty for other training rows."""
    train, bundled = get(".train_files"), get.default(".train_files")
    is_bundled = ([train] if isinstance(train, str) else train) == bundled
    return [held_out_beside(name) for name in bundled] if is_bundled else []


class RowsConfig(Section):
    """`data.*`: the keys that all kinds of run have in common."""

    train_files: SourceList = Field(min_length=1)
    """Training rows, one source or a list: a file (.parquet, .jsonl, .json, .csv), a folder, a data set of the hub as
    `<owner>/<name>:<configuration>:<split>`, or `bundled:<task>/<split>`. `{path: …, weight: 2.0}` is a source with
    options, see docs/your-own-data.md."""
    val_files: SourceList = follows(_val_files_beside)
    """Validation rows, written like `data.train_files`; null or [] for none. Default: the bundled ones beside the
    bundled `train_files`, none beside others."""
    shuffle: bool = True
    """Shuffle the training rows anew each epoch; the order is a function of (seed, epoch)."""
    seed: NonNegativeInt = follows("trainer.seed")
    """Seed of the row order. Default: `trainer.seed`."""
    map: dict[str, str] = Field(default_factory=dict)
    """Column as hrl names it → column of the rows, `{prompt: question}`; `a.b` is the field `b` of the column `a`."""
    image_key: str | None = "images"
    """Column of the pictures that the prompt shows, one for each `<image>` of it: paths, or the bytes of files. Null
    shows none, whatever pictures the rows have."""
    video_key: str | None = "videos"
    """Column of the videos that the prompt shows, one for each `<video>` of it: lists or folders of their frames. Null
    shows none."""
    train_max_samples: MinusOneOrMore = -1
    """Use only this many training rows; -1 uses all."""
    val_max_samples: MinusOneOrMore = -1
    """Use only this many validation rows; -1 uses all."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    bad_rows: Literal["error", "skip"] = "error"
    """What happens to a row that can't be used: stop the run and name file and row (error), or skip and count it."""


def _bundled_rows() -> list[str | dict[str, Any]]:
    return ["bundled:addition/train"]


def _sampler(value: object) -> object:
    """Return a sampler as a mapping; a text is its name, and verl's nulls are none."""
    if isinstance(value, str):
        return {"name": value}
    return None if isinstance(value, Mapping) and all(item is None for item in value.values()) else value


class DataConfig(RowsConfig):
    """`data.*`: which rows are trained on, and how they become prompts."""

    train_files: SourceList = Field(default_factory=_bundled_rows, min_length=1)
    """Training rows, one source or a list: a file (.parquet, .jsonl, .json, .csv), a folder, a data set of the hub as
    `<owner>/<name>:<configuration>:<split>`, `bundled:<task>/<split>`, or `reasoning_gym:<dataset>?size=1000&seed=1`.
    `{path: …, weight: 2.0}` is a source with options, see docs/your-own-data.md."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a chat (list of messages) or a string. Rows without it may have `messages`."""
    answer_key: str | None = None
    """Column that holds the right answer. Null takes `reward_model.ground_truth`, or else the column `ground_truth` or
    `answer`."""
    max_prompt_length: Annotated[PositiveInt, Unit("tokens")] = 512
    """Longest prompt in tokens, chat template and pictures included."""
    max_response_length: Annotated[PositiveInt, Unit("tokens")] = 512
    """Maximum number of tokens generated per sample."""
    train_batch_size: Annotated[PositiveInt, Unit("prompts per step")] = 1024
    """Prompts per step; each is sampled `actor_rollout_ref.rollout.n` times."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `data.max_prompt_length` when the rows are read, and count them."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a prompt that is too long and was not dropped: stop the run (error), or cut tokens off its left
    or right end."""
    sampler: Annotated[dict[str, Any] | None, BeforeValidator(_sampler)] = None
    """Which prompts come next: null takes each once per epoch, `pass_rate` those that are sometimes solved,
    `my_sampler.py:MyClass` a class of your own. `{name: pass_rate, floor: 0.1}` has options."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
