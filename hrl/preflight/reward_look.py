"""The preflight check of the reward of a PPO run."""

from __future__ import annotations

from typing import Any

from hrl.config.arithmetic import Fact, count
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import RewardConfig
from hrl.data.dataset import PromptRow, columns_of_rows
from hrl.data.user_file import functions_in_user_file, names_in_user_file
from hrl.nearest import nearest
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.given import Given
from hrl.reward.function import RewardFunctionError, RewardSpec
from hrl.reward.pool import RewardPool
from hrl.reward.score import find_scorer, why_no_scorer

_FUNCTION = "reward.custom_reward_function"


def look_at_reward(findings: Findings, config: PPOTrainerConfig, given: Given, train: Any, val: Any) -> None:
    """Load the reward function and check that it can score the rows.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        given: A reward function that the caller gave as an object.
        train: Rows to train on, None if they could not be read.
        val: Rows to validate on.
    """
    reward, custom = config.reward, config.reward.custom_reward_function
    if reward.function_weight == 0:
        if given.reward is not None:
            what = "is 0, so the given reward function would have no effect."
            findings.problem("reward.function_weight", what, "Set it to 1, or give no function.")
        findings.facts.append(Fact("reward", f"the reward model {reward.reward_model.model_path} alone"))
        return
    known: tuple[str, ...] = ()
    if given.reward is not None:
        words = name = getattr(given.reward, "__qualname__", type(given.reward).__qualname__)
        _look_for_ground_truth(findings, name, train, val)
    elif custom.path is None:
        known = _look_at_scorers(findings, {"data.train_files": train, "data.val_files": val})
        words = "; ".join(f"{source} pays for {find_scorer(source).rule}" for source in known) or "built-in"
    elif _look_at_function(findings, custom.path, custom.name):
        words = f"{custom.name} of {custom.path}"
        _look_for_ground_truth(findings, custom.name, train, val)
    else:
        return
    also = f", and the reward model {reward.reward_model.model_path}" if config.needs_reward_model else ""
    findings.facts.append(Fact("reward", words + also))
    if known or custom.path is not None or given.reward is not None:
        columns = columns_of_rows(rows for rows in (train, val) if rows is not None)
        _load_where_it_runs(findings, reward, given, known, columns)


def _look_for_ground_truth(findings: Findings, name: str, train: Any, val: Any) -> None:
    """Add a note if some rows have no ground truth for a user's own function."""
    bare = sum(len(_without_ground_truth(rows)) for rows in (train, val))
    if bare:
        what = "an answer (a column `answer`, or reward_model.ground_truth)"
        findings.notes.append(f"{count(bare, 'row')} without {what}: {name} gets None there")


def _without_ground_truth(rows: Any) -> list[PromptRow]:
    """Return the rows without a ground truth."""
    return [row for row in getattr(rows, "rows", ()) if row.reward_model.get("ground_truth") is None]


def _look_at_scorers(findings: Findings, datasets: dict[str, Any]) -> tuple[str, ...]:
    """Check that every data source has a built-in scorer and every row a ground truth."""
    known: dict[str, None] = {}
    for key, rows in datasets.items():
        for source in () if rows is None else rows.data_sources:
            reason = why_no_scorer(source)
            if reason is None:
                known[source] = None
            else:
                findings.problem(key, f"has rows that can't be scored: {sentence(reason)}")
        lacking = _without_ground_truth(rows)
        if lacking:
            what = (
                f"has {count(len(lacking), 'row')} without reward_model.ground_truth, which the built-in scorers "
                f"compare answers with; the first is {lacking[0].origin}."
            )
            findings.problem(key, what, f"Add it, or score with a function of your own: {_FUNCTION}.path.")
    return tuple(known)


def _look_at_function(findings: Findings, path: str, name: str) -> bool:
    """Return whether the user's file exists and defines the function, without running it."""
    names: set[str] | None = None
    before = len(findings.problems)
    with findings.about(f"{_FUNCTION}.path"):
        names = names_in_user_file(path)
    if len(findings.problems) > before:
        return False
    if names is None or name in names:
        return True
    public = sorted(one for one in names if not one.startswith("_"))
    close = nearest(name, public) or functions_in_user_file(path)[-1:]  # helper functions usually come first
    hint = f"Set {_FUNCTION}.name={close[0]}?" if close else "Define it there."
    what = f"is {name}, which {path} does not define; it has: {', '.join(public) or 'nothing'}."
    findings.problem(f"{_FUNCTION}.name", what, hint)
    return False


def _load_where_it_runs(
    findings: Findings,
    reward: RewardConfig,
    given: Given,
    data_sources: tuple[str, ...],
    columns: tuple[str, ...],
) -> None:
    """Load the function, or the built-in scorers of the data sources, in a reward process like those of a run."""
    key = "data.train_files" if reward.custom_reward_function.path is None else f"{_FUNCTION}.path"
    try:
        spec = RewardSpec.of_config(reward, data_sources, given.reward, columns)
        with RewardPool(spec, reward.model_copy(update={"num_workers": 1})):
            pass
    except (RewardFunctionError, ValueError) as error:
        findings.problem("reward" if given.reward is not None else key, f"can't be used: {sentence(str(error))}")
