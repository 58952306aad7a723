"""The first samples say whether there is anything to learn, with one of them and what to try if not."""

import io
import json

import pytest
from rich.console import Console

from hrl.config import compose_cli
from hrl.config.environment import EnvironmentConfig
from hrl.config.reward import RewardConfig
from hrl.report.console import JsonConsole, RunConsole
from hrl.report.first_look import Finding, first_look
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder

CONFIG = compose_cli([])


def samples(*groups, source="sums", **fields):
    """A group of scores per prompt."""
    return [
        {
            "data_source": source,
            "uid": str(prompt),
            "prompt": f"<user>{prompt} + 1 =",
            "question": f"{prompt} + 1 =",
            "response": f"answer {number}",
            "score": score,
            "finish_reason": "stop",
            "response_length": 3,
            "ground_truth": {"question": "…", "answer": str(prompt + 1)},
            **fields,
        }
        for prompt, group in enumerate(groups)
        for number, score in enumerate(group)
    ]


@pytest.mark.parametrize(
    ("groups", "finding", "headline"),
    [
        (
            [[0, 1], [0, 0]],
            Finding.SOMETHING,
            "1 of 4 samples score above 0, 0.25 on average; the answers to 1",
        ),
        ([[0, 0], [0, 0]], Finding.NOTHING_RIGHT, "0 of 4 samples score above 0: there is nothing to learn from yet"),
        ([[-1, -1], [0, 0]], Finding.NOTHING_RIGHT, "0 of 4 samples score above 0"),
        ([[-1, 0], [0, 0]], Finding.SOMETHING, "0 of 4 samples score above 0, -0.25 on average"),
        ([[1, 1], [1, 1]], Finding.ALL_RIGHT, "all 4 samples have the score 1: there is nothing left to learn"),
        ([[0.1, 0.1], [0.1, 0.1]], Finding.ALIKE, "4 of 4 samples score above 0, but the answers to each prompt"),
        ([[1, 1], [0, 0]], Finding.ALIKE, "2 of 4 samples score above 0, but the answers to each prompt score alike"),
        ([[None, None]], Finding.UNSCORED, "none of 2 samples has a score"),
        ([[None, 0], [0, 0]], Finding.NOTHING_RIGHT, "0 of 4 samples"),
    ],
)
def test_what_there_is_to_learn_is_told_from_scores(groups, finding, headline):
    look = first_look(samples(*groups), CONFIG)
    assert look.finding is finding
    assert look.headline.startswith(headline)
    assert bool(look.advice) == bool(look.facts) == (finding is not Finding.SOMETHING)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_without_a_comparison_inside_a_prompt_all_answers_of_the_step_are_compared(estimator, n):
    recipe = ["recipe=ppo"] if estimator == "gae" else [f"algorithm.adv_estimator={estimator}"]
    config = compose_cli([*recipe, f"actor_rollout_ref.rollout.n={n}"])
    alone = [samples(*([score] * n for score in scores)) for scores in ((1, 0), (-1, -3), (0.1, 0.1), (-1, -1))]
    found = [first_look(of_step, config) for of_step in alone]
    assert [look.finding for look in found] == [
        *(Finding.SOMETHING, Finding.SOMETHING),
        *(Finding.ALIKE, Finding.NOTHING_RIGHT),
    ]
    assert found[1].headline == f"0 of {2 * n} samples score above 0, -2 on average"
    assert "but all of them score alike" in found[2].headline


def test_a_score_is_judged_as_the_function_gave_it_and_compared_as_it_is_trained_on():
    alike = samples([1, 1], [1, 1])
    standardised = [{**sample, "shaped_score": 0.0} for sample in alike]
    assert first_look(standardised, CONFIG).finding is Finding.ALL_RIGHT
    penalised = [{**sample, "shaped_score": -0.1 * number} for number, sample in enumerate(alike)]
    look = first_look(penalised, CONFIG)
    assert look.finding is Finding.SOMETHING
    assert look.headline.startswith("4 of 4 samples score above 0, 1 on average; the answers to 2")


def test_the_full_score_of_a_sum_is_no_single_part_of_it():
    both = compose_cli(["reward.functions=[numeric,{name: tags}]"])
    only_form = first_look(samples([1, 1], [1, 1], reward_parts={"correct": 0.0, "tags": 1.0}), both)
    assert only_form.finding is Finding.ALIKE
    assert only_form.advice[0] == "these parts of the reward are 0 in every sample: correct"
    assert first_look(samples([2, 2], [2, 2]), both).finding is Finding.ALL_RIGHT
    penalised = samples([0.95, 0.95], [0.95, 0.95], reward_parts={"acc": 1.0})
    assert first_look(penalised, both).finding is Finding.ALL_RIGHT
    assert first_look(samples([1, 1], [1, 1], reward_parts={"acc": 0.0}), CONFIG).finding is Finding.ALIKE


def test_right_answers_are_counted_where_a_form_is_paid_for_too():
    paid = samples([1.1, 0.1], [0.1, 0.1])
    judged = [{**sample, "reward_parts": {"acc": float(sample["score"] > 1)}} for sample in paid]
    assert first_look(paid, CONFIG).headline.startswith("4 of 4 samples score above 0, 0.35 on average")
    assert first_look(judged, CONFIG).headline.startswith("1 of 4 samples are right, 4 score above 0, 0.35 on average")
    alike = first_look(samples([0.1, 0.1], reward_parts={"acc": False}), CONFIG)
    assert alike.headline.startswith("0 of 2 samples are right, 2 score above 0, but the answers to each prompt")
    in_part = [*judged[:3], paid[3]]
    assert "right" not in first_look(in_part, CONFIG).headline, "nobody judged the last"
    both = first_look(samples([1, 0], reward_parts={"acc": 1.0})[:1] + samples([1, 0])[1:], CONFIG)
    assert both.headline.startswith("1 of 2 samples score above 0")


def test_advice_is_about_what_is_seen():
    cut = first_look(samples([0, 0], finish_reason="length"), CONFIG)
    assert cut.advice[0] == "2 of 2 answers were cut off at data.max_response_length=32: raise it"
    assert "empty" in first_look(samples([0, 0], response=" "), CONFIG).advice[0]
    parts = first_look(samples([0, 0], reward_parts={"format": 0.0, "brevity": 0.4, "pred": "x"}), CONFIG)
    assert parts.advice[0] == "these parts of the reward are 0 in every sample: format"
    tags = compose_cli(["data.train_files=reasoning_gym:chain_sum?answer=tags"])
    assert "answer=plain" in first_look(samples([0, 0], source="reasoning_gym/chain_sum"), tags).advice[0]
    assert "level=1" in first_look(samples([1, 1], source="reasoning_gym/chain_sum"), tags).advice[0]
    assert not any("answer=plain" in line for line in first_look(samples([0, 0]), CONFIG).advice)


def test_it_is_shown_once_and_kept_in_the_run_folder(tmp_path):
    shown, lines = io.StringIO(), io.StringIO()
    look = first_look(samples([0, 0], reward_parts={"format": 0.0}, response="[bold]\x1b[31mx"), CONFIG)
    console = RunConsole(Console(file=shown, width=100, color_system=None))
    with RunReporter(RunFolder(tmp_path), console, CONFIG.trainer, {}) as reporter:
        reporter.first_look(look)
    text = shown.getvalue()
    for part in (
        "first look: 0 of 2 samples",
        "prompt",
        "0 + 1 =",
        r"[bold]\x1b[31mx",
        "expected",
        "format 0",
        "to try",
    ):
        assert part in text, part
    assert "…" not in text  # the whole ground truth
    kept = json.loads((tmp_path / "first_look.json").read_text())
    assert (kept["finding"], kept["example"]["response"]) == ("nothing_right", "[bold]\x1b[31mx")
    JsonConsole(lines).first_look(look)
    assert json.loads(lines.getvalue())["headline"] == look.headline


# ---------------------------------------------------------------------------------------------- episodes

PLAYED = {"turns": [{"text": "a guess", "reward": 0.0}], "messages": [{"role": "user", "content": "Guess."}]}


def episodes(*scores, **fields):
    return [{**one, **PLAYED, "end": "done", **fields} for one in samples(scores)]


def config_with(**environment):
    return CONFIG.model_copy(update={"environment": EnvironmentConfig(path="game.py:Game", **environment)})


def test_an_episode_is_shown_with_its_turns_and_how_it_ended():
    facts = first_look(episodes(0, 0), config_with()).facts
    assert facts["response"] == "assistant: a guess  [reward 0]"
    assert facts["ended by"] == "done after 1 turn"


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        ("max_turns", "2 of 2 episodes were cut off at environment.max_turns=3: raise it"),
        ("max_prompt", f"data.max_prompt_length={CONFIG.data.max_prompt_length}: raise it"),
        ("max_tokens", f"data.max_response_length={CONFIG.data.max_response_length}: raise it"),
        ("deadline", "environment.episode_timeout_s=600: raise it"),
        ("failed", "2 of 2 episodes failed, most often with: it broke; `hrl env-test` plays some of them alone"),
    ],
)
def test_episodes_that_ended_badly_say_which_limit_or_error(end, advice):
    look = first_look(episodes(0, 0, end=end, error="it broke", finish_reason="length"), config_with(max_turns=3))
    assert any(advice in line for line in look.advice)
    assert not any("answers were cut off" in line for line in look.advice), "the limit of a response is not meant"


@pytest.mark.parametrize(("reward", "is_told"), [(None, True), (0.0, False)])
def test_an_environment_that_paid_nothing_is_told_how_it_pays(reward, is_told):
    unpaid = {"turns": [{"text": "a guess", "reward": reward}]}
    config = config_with().model_copy(update={"reward": RewardConfig()})
    advice = first_look(episodes(0, 0, **unpaid), config).advice
    assert any("hrl.StepResult(…, reward=1.0)" in line for line in advice) == is_told


def test_what_an_environment_can_pay_at_most_is_not_known():
    assert first_look(episodes(2.0, 2.0), config_with()).finding is Finding.ALIKE
    judged = episodes(2.0, 2.0, reward_parts={"acc": 1.0})
    assert first_look(judged, config_with()).finding is Finding.ALL_RIGHT
