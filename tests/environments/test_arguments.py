"""Arguments of constructors are read as their types, and what does not fit is named by its key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

import hrl
from hrl.environments.arguments import EnvironmentArgumentError, check_names, read_arguments
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec

if TYPE_CHECKING:
    from decimal import Context


@dataclass
class Level:
    depth: int
    name: str = "first"


class Limits(BaseModel):
    most: float


class Typed(hrl.SingleTurn):
    def __init__(
        self,
        level: Level | None = None,
        limits: Limits | None = None,
        folder: Path = Path(),
        words: list[str] | None = None,
        context: Context | None = None,
        free=None,
        **others: Any,
    ) -> None:
        self.given = (level, limits, folder, words, context, free, others)


def test_dicts_become_dataclasses_and_models_as_the_arguments_of_tools_do() -> None:
    kwargs = {"level": {"depth": 3}, "limits": {"most": 1}, "folder": "a/b", "words": ["a", 2]}
    read = read_arguments(Typed, kwargs, "Typed")
    assert read == {"level": Level(3), "limits": Limits(most=1.0), "folder": Path("a/b"), "words": ["a", "2"]}
    assert type(read["limits"].most) is float
    assert kwargs["level"] == {"depth": 3}, "what the configuration has stays as it is"


def test_what_has_no_type_that_is_known_stays_as_it_is() -> None:
    given = {"context": "x", "free": {"a": 1}, "anything": [1]}
    assert read_arguments(Typed, given, "Typed") == given


def test_an_episode_is_given_arguments_of_these_types() -> None:
    maker = EnvironmentMaker(EnvironmentSpec.of(f"{__file__}:Typed", {"level": {"depth": 2}}))
    first, second = maker.make().given[0], maker.make(None, {"level": {"depth": 5}}).given[0]
    assert (type(first).__name__, first.depth, second.depth) == ("Level", 2, 5)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        (
            {"level": {"depth": "deep"}},
            r"environment\.kwargs\.level is \{'depth': 'deep'\}, where Level \| None .*\(depth: a valid int",
        ),
        (
            {"limits": {}},
            r"environment\.kwargs\.limits is \{\}, where Limits \| None is expected \(most: Field required\)",
        ),
        ({"words": 3}, r"environment\.kwargs\.words is 3, where list\[str\] \| None is expected \(a valid list\)"),
    ],
)
def test_what_does_not_fit_is_named_by_its_key(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(EnvironmentArgumentError, match=told):
        read_arguments(Typed, kwargs, "Typed")


def test_the_value_of_an_environment_variable_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "swordfish")
    with pytest.raises(EnvironmentArgumentError, match="words is what the environment variable A_KEY has") as refused:
        read_arguments(Typed, {"words": "swordfish"}, "Typed")
    assert "swordfish" not in str(refused.value)


def test_arguments_of_a_named_environment_are_refused_in_a_sentence_and_before_an_episode() -> None:
    with pytest.raises(EnvironmentLoadError) as refused:
        EnvironmentMaker(EnvironmentSpec.of("retry", {"attempts": "two"}))
    assert str(refused.value) == (
        "retry can't be made: environment.kwargs.attempts is 'two', where int is expected "
        "(a valid integer, unable to parse string as an integer)"
    )
    with pytest.raises(EnvironmentLoadError, match=r"environment\.row_environments\.retry\.attempts is 'two'"):
        spec = EnvironmentSpec.of("tools", row_environments={"retry": {"attempts": "two"}})
        EnvironmentMaker(spec).check_choice("retry", None)
    with pytest.raises(EnvironmentLoadError, match=r"made: env_kwargs\.attempts is 'two'"):
        EnvironmentMaker(EnvironmentSpec.of("retry")).check_choice(None, {"attempts": "two"})


def test_what_a_constructor_takes_is_shown_as_its_author_wrote_it() -> None:
    class Zoo:
        def __init__(self, level: Level, folder: Path | str = "a", *, size=3, **others: Any) -> None:
            pass

    with pytest.raises(EnvironmentArgumentError) as refused:
        check_names(Zoo, {"folder": "b"}, "Zoo")
    assert str(refused.value) == (
        "Zoo can't be made: environment.kwargs.level is missing. It takes (level: Level, folder: Path | str = 'a', "
        "*, size=3, **others: Any)"
    )


def test_the_name_under_which_a_file_is_imported_is_in_no_message(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(
        "import hrl, dataclasses\n@dataclasses.dataclass\nclass Cat:\n    legs: int\n"
        "class Zoo(hrl.SingleTurn):\n    def __init__(self, cat: Cat): ...\n"
    )
    for kwargs, told in (({"cta": 1}, r"It takes \(cat: Cat\)$"), ({"cat": 1}, "where Cat is expected")):
        with pytest.raises(EnvironmentLoadError, match=told) as refused:
            EnvironmentMaker(EnvironmentSpec.of(f"{tmp_path}/zoo.py:Zoo", kwargs))
        assert "hrl_user" not in str(refused.value) and "'str" not in str(refused.value)


def test_a_class_that_only_lacks_close_is_told_to_inherit() -> None:
    class NotEnv:
        def reset(self, row):
            return "?"

        def step(self, action):
            return None

    with pytest.raises(EnvironmentLoadError, match="no method close; .*: make it a subclass of hrl.Environment"):
        EnvironmentSpec.of(None, given=NotEnv)
