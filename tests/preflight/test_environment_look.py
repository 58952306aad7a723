"""What an environment can't do is said before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hrl.config.load import validate_kind
from hrl.config.run_kind import PPO
from hrl.data.dataset import RLHFDataset
from hrl.environments.loading import EnvironmentTraits
from hrl.episodes import parser_choice
from hrl.models.tokenizer import TokenIds, load_tokenizer
from hrl.preflight import environment_look
from hrl.preflight.data_look import look_at_rows, look_at_template
from hrl.preflight.environment_look import look_at_environment
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from tests.models.tiny_pictures import config_of, picture, png, save_processors
from tests.preflight.small_run import ROW, save_model, write_rows

TOOLS_OF_A_CLASS = '''
import hrl

class Silent(hrl.ToolEnvironment):
    @hrl.tool
    def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number
'''
PLAIN = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
WITH_TOOLS = PLAIN + "{% if tools %}<tool_call> {{ tools[0]['function']['name'] }}{% endif %}"
WITH_OTHER_CALLS = PLAIN + "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast.from_pretrained(save_model(tmp_path / "policy"))
    made.chat_template = WITH_TOOLS
    return made


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what the environment's process would."""

    def say(**traits: bool) -> None:
        async def answer(*_: object) -> tuple[EnvironmentTraits, list[str | None]]:
            return EnvironmentTraits(**traits), []

        monkeypatch.setattr(environment_look, "try_environment", answer)

    monkeypatch.setattr(parser_choice, "known_parsers", lambda: (("hermes", "mistral"), ("qwen3",)))
    say()
    return say


def look(tokenizer: Any, columns: tuple[str, ...] = (), **settings: Any) -> Findings:
    values = {"data.train_files": ["rows.jsonl"]}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    findings = Findings()
    look_at_environment(findings, validate_kind(PPO, values), Given(), tokenizer, SimpleNamespace(columns=columns))
    return findings


def test_an_environment_that_nobody_pays_is_refused_by_its_class(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(TOOLS_OF_A_CLASS)
    path = f"{tmp_path / 'mine.py'}:Silent"
    [problem] = look(tokenizer, environment__path=path, environment__num_workers=1).problems
    assert problem.key == "environment.path" and "which gives no reward" in problem.what
    assert "reward.functions=[data_source]" in problem.hint and "`answered`" in problem.hint


@pytest.mark.parametrize(
    "paid", [{"reward__functions": ["data_source"]}, {"columns": ("env",)}, {"environment__path": "python"}]
)
def test_what_somebody_pays_passes(tokenizer, loaded, paid):
    loaded(is_unpaid=True)
    assert look(tokenizer, **{"environment__path": "mine.py:Silent"} | paid).problems == []


@pytest.mark.parametrize("template", [None, WITH_OTHER_CALLS])
def test_tools_whose_calls_nothing_can_read_are_refused(tokenizer, loaded, template):
    loaded(has_tools=True)
    tokenizer.chat_template = template
    [problem] = look(tokenizer, environment__path="tools", environment__tools=["python"]).problems
    assert problem.key == "environment.tool_parser" and "et environment.tool_parser=hermes" in problem.what


def test_a_template_that_tells_its_parser_needs_no_look_at_the_engine(tokenizer, loaded, monkeypatch):
    loaded(has_tools=True)
    monkeypatch.setattr(environment_look, "TurnParser", None)
    found = look(tokenizer, environment__path="tools", environment__tools=["python"])
    assert (found.problems, found.notes) == ([], [])


def test_the_limits_of_episodes_and_what_reads_calls_are_facts(tokenizer, loaded):
    loaded(has_tools=True)
    found = look(tokenizer, environment__path="tools", environment__tools=["python"], environment__step_timeout_s=70)
    facts = dict(found.facts)
    assert facts["environment"] == "tools, at most 8 turns"
    assert facts["parsers"] == "hermes reads tool calls (<tool_call> in the chat template)"
    assert "a message of the environment 1,024 tokens; an episode 600, a call 70, a tool 30 s" in facts["episodes"]
    assert facts["episodes"].endswith("2 environment processes")
    named = look(tokenizer, environment__path="tools", environment__tool_parser="mistral")
    assert dict(named.facts)["parsers"] == "mistral reads tool calls (environment.tool_parser)"


def test_an_environment_of_tools_without_one_is_noted_and_refused_where_no_class_could_bring_one(tokenizer, loaded):
    loaded(lacks_tools=True)
    found = look(tokenizer, environment__path="mine.py:Silent", reward__functions=["data_source"])
    assert "mine.py has no tools for the policy to call: environment.tools names none" in found.notes[0]
    assert dict(found.facts)["parsers"].startswith("none") and found.problems == []
    [problem] = look(tokenizer, environment__path="tools", reward__functions=["data_source"]).problems
    assert problem.key == "environment.tools" and "names no tool" in problem.what and "my_tools.py" in problem.hint


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("a-b:Game", "is 'a-b:Game', where a file or a module and a name are expected"),
        ("/no/game.py:Game", "can't be used: /no/game.py does not exist."),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_once(tokenizer, path, what):
    [problem] = look(tokenizer, environment__path=path).problems
    assert problem.key == "environment.path" and problem.what.startswith(what)
    assert str(problem).count("environment.path") == 1


@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_is_named_is_looked_up_for_any_environment(tokenizer, loaded, key):
    [problem] = look(tokenizer, environment__path="retry", **{f"environment__{key}": "hermess"}).problems
    assert problem.key == f"environment.{key}" and "which is none of vLLM's" in problem.what


def test_a_template_that_hides_the_tools_is_noted(tokenizer, loaded, monkeypatch):
    loaded(has_tools=True)
    tokenizer.chat_template = "<tool_call>" + PLAIN
    [note] = look(tokenizer, environment__path="tools", environment__tools=["python"]).notes
    assert "the chat template shows no tools" in note


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"environment__tools": ["python"], "environment__max_turns": 3}, "tools", "Set environment.path=tools, or"),
        ({"environment__max_turns": 3}, "max_turns", "path=my_env.py:Class, or leave out environment.max_turns."),
    ],
)
def test_settings_without_an_environment_are_refused(tokenizer, settings, key, hint):
    [problem] = look(tokenizer, **settings).problems
    assert problem.key == f"environment.{key}" and hint in problem.hint


def test_rows_that_name_environments_in_a_run_without_one_are_noted(tokenizer):
    [note] = look(tokenizer, columns=("env",)).notes
    assert "column env" in note and "environment.path" in note
    assert look(tokenizer).notes == []


def test_a_row_that_chooses_what_it_must_not_is_named_before_anything_starts(tokenizer, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [ROW, ROW | {"env": "retry"}, ROW | {"env": "mcp"}, ROW | {"env": "x"}])
    config = validate_kind(PPO, {"data.train_files": [str(rows)], "environment.path": "single_turn"})
    findings = Findings()
    train, val = look_at_rows(findings, config, Given(), tokenizer, None)
    look_at_environment(findings, config, Given(), tokenizer, train, val)
    [problem] = [one for one in findings.problems if one.key == "environment.path"]
    assert f"{rows} line 3" in problem.what and "has env 'mcp'" in problem.what
    assert "environment.row_environments.mcp={…}" in problem.what


@pytest.mark.parametrize(("limit", "is_told"), [(4, True), (4000, False)])
def test_a_first_prompt_that_is_too_long_with_its_tools_is_told_before_the_run(
    tokenizer: Any, limit: int, is_told: bool
) -> None:
    values = {"data.train_files": ["rows.jsonl"], "data.max_prompt_length": limit, "environment.path": "tools"}
    config = validate_kind(PPO, values | {"environment.tools": ["my.py:look_up"]})
    row = {"raw_prompt": [{"role": "user", "content": "?"}]}
    rows = type("Rows", (), {"known": [0], "__getitem__": lambda *_: row})()
    findings, ids = Findings(), TokenIds(0, (1,), len(tokenizer))
    look_at_template(findings, config, rows, tokenizer, ids, [environment_look._TOOL])
    assert [problem.key for problem in findings.problems] == ["data.max_prompt_length"] * is_told
    assert "look_it_up" in next(fact.text for fact in findings.facts if fact.label == "first prompt")


AGENT = """
import hrl

class Asks(hrl.AgentEnvironment):
    async def run(self, row, client):
        return 1.0
"""


def test_a_program_that_asks_the_policy_itself_is_shown_no_pictures(tokenizer, tmp_path):
    (tmp_path / "asks.py").write_text(AGENT)
    settings = {"environment.path": f"{tmp_path / 'asks.py'}:Asks", "environment.num_workers": 1}
    config = validate_kind(PPO, settings | {"data.train_files": ["rows.jsonl"]})
    told = []
    for sees in (False, True):
        findings, train = Findings(), SimpleNamespace(columns=(), has_pictures=sees)
        look_at_environment(findings, config, Given(), tokenizer, train)
        told.append([problem.what for problem in findings.problems if "asks the policy itself" in problem.what])
    assert told[0] == [] and "the rows have pictures, which the run's server takes from no program" in told[1][0]


def test_a_prompt_with_tools_is_as_long_as_its_pictures_are(tmp_path):
    config_of().save_pretrained(tmp_path)
    save_processors(tmp_path, "qwen2_5_vl")
    tokens = load_tokenizer(tmp_path)
    limit = 120  # of the row alone, without tools; the template shows none, so the picture is all that is to be counted
    found = []
    for most in (limit, 2 * limit):
        values = {
            "data.train_files": ["given"],
            "data.max_prompt_length": most,
            "actor_rollout_ref.model.path": str(tmp_path),
        }
        config = validate_kind(PPO, values)
        row = {"prompt": "<image>" + "a" * 100, "images": [png(picture(1))]}
        settings = config.data.model_copy(update={"answer_key": None, "max_prompt_length": 1000})
        train, findings = RLHFDataset([row], tokens, settings), Findings()
        ids = TokenIds(pad=0, stop=(2,), vocab_size=272)
        look_at_template(findings, config, train, tokens, ids, [{"type": "function", "function": {"name": "look"}}])
        found.append([problem.what for problem in findings.problems])
    length = len(RLHFDataset([row], tokens, settings).tokens[0])
    assert length > limit and f"the first prompt has {length} tokens" in found[0][0] and found[1] == []
