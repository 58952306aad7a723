"""The preflight check of the reward of a PPO run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hrl.config.arithmetic import Fact, count
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import RewardConfig, RewardEntry
from hrl.data.dataset import PromptRow, columns_of_rows
from hrl.data.sources import GROUND_TRUTH
from hrl.nearest import nearest
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.given import Given
from hrl.processes.isolation import isolation_limit
from hrl.reward.function import RESPONSE, RewardFunctionError, names_taken, unwrapped
from hrl.reward.library.catalogue import CATALOGUE
from hrl.reward.pool import RewardPool
from hrl.reward.score import find_scorer, why_no_scorer
from hrl.reward.spec import RewardSpec, with_served
from hrl.reward.weighted import entries_of
from hrl.user_file import functions_in_user_file, names_in_user_file, names_taken_in_user_file

_AS_TEXT = "Only numbers, text, lists and dicts can go to another process: write what the reward needs as text"
_FUNCTION, _FUNCTIONS = "reward.custom_reward_function", "reward.functions"


class Scored(NamedTuple):
    """Whose samples are scored."""

    steps: bool = True
    validations: bool = True

    @classmethod
    def of(cls, config: PPOTrainerConfig, given: Given, train: Any, val: Any) -> Scored:
        """Return whose samples a run scores.

        All, unless it learns from a teacher alone, names nothing that scores, and the built-in scorers can't.

        Args:
            config: The validated configuration.
            given: A reward function that the caller gave as an object.
            train: Rows to train on, None if they could not be read.
            val: Rows to validate on.
        """
        if given.reward is not None or not config.may_leave_unscored:
            return cls()
        if not config.reward_entries:
            return cls(steps=False, validations=False)
        return cls(train is None or _can_be_scored(train), val is not None and _can_be_scored(val))

    def of_steps(self, config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
        """Yield every key that needs scores of a step's samples, which have none, and how it does without."""
        if self.steps:
            return
        algorithm = config.algorithm
        keys = {
            "algorithm.filter_groups.enable": (algorithm.filter_groups.enable, "false"),
            "algorithm.use_pf_ppo": (algorithm.use_pf_ppo, "false"),
            "data.sampler": (config.data.sampler is not None, "null"),
            "critic.enable": (config.needs_critic, "false, and algorithm.adv_estimator=reinforce_plus_plus"),
        }
        yield from ((key, instead) for key, (is_set, instead) in keys.items() if is_set)


ALL_SCORED = Scored()


def _can_be_scored(rows: Any) -> bool:
    return all(why_no_scorer(source) is None for source in rows.data_sources) and not _without_ground_truth(rows)


def look_at_reward(
    findings: Findings, config: PPOTrainerConfig, given: Given, train: Any, val: Any, scored: Scored = ALL_SCORED
) -> None:
    """Load the reward function and check that it can score the rows.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        given: A reward function that the caller gave as an object.
        train: Rows to train on, None if they could not be read.
        val: Rows to validate on.
        scored: Whose samples are scored.
    """
    reward = config.reward
    try:
        entries = list(config.reward_entries) if given.reward is None else entries_of(given.reward)
    except RewardFunctionError as error:
        findings.problem("reward", f"can't be used: {sentence(str(error))}")
        return
    lacking = [entry.path for entry in entries if not isinstance(entry, tuple) and entry.is_object]
    if lacking:
        findings.problem(
            _FUNCTIONS,
            f"has {lacking[0]}: a function that an earlier run was given from Python, and this run is not.",
            "Give it again (hrl.GRPO(reward=…)), or name its file (my_reward.py:function).",
        )
        return
    for key, instead in scored.of_steps(config):
        what = "needs scores, and the rows to train on have none: a teacher alone is learnt from."
        findings.problem(key, what, f"Set it to {instead}, or name something that scores with {_FUNCTIONS}.")
    if not any(scored):
        findings.facts.append(Fact("reward", "none: samples are not scored, and the teacher alone is learnt from"))
        return
    for key, rows, is_scored in zip(("data.train_files", "data.val_files"), (train, val), scored, strict=True):
        if rows is not None and not is_scored:
            findings.notes.append(f"{key} has rows without an answer or a scorer: their samples have no score")
    train, val = train if scored.steps else None, val if scored.validations else None
    also = f"the reward model {reward.reward_model.model_path}" if config.needs_reward_model else ""
    if config.environment.pays:
        also = f"{also} and the environment" if also else "the environment"
    if not entries:
        findings.facts.append(Fact("reward", f"{also} alone"))
        return
    before, words = len(findings.problems), list[str]()
    known: tuple[str, ...] = ()
    to_score = {"data.train_files": train, "data.val_files": val}
    for entry in entries:
        if isinstance(entry, tuple):
            name, _, weight = entry
            what = name
        else:
            name, weight, what = entry.part, entry.weight, _what_it_is(entry)
        if not isinstance(entry, tuple) and entry.name == "data_source":
            known = _look_at_scorers(findings, to_score)
            what = "; ".join(f"{source} pays for {find_scorer(source).rule}" for source in known) or "built-in"
        elif isinstance(entry, tuple) or entry.path is not None:
            if isinstance(entry, tuple):
                _look_for_ground_truth(findings, name, names_taken(unwrapped(entry[1])), train, val)
            elif _look_at_function(findings, reward, *entry.file_and_function):
                taken = names_taken_in_user_file(*entry.file_and_function)
                _look_for_ground_truth(findings, name, taken, train, val)
        elif CATALOGUE[str(entry.name)].needs_answer:
            _look_for_answers(findings, f"the function {entry.name}", to_score)
        words.append(what if len(entries) == 1 and weight == 1 else f"{weight:g} · {what}")
    findings.facts.append(Fact("reward", " + ".join(words) + (f", and {also}" if also else "")))
    there = [each for each in (train, val) if each is not None]
    left_out = {name: why for each in there for name, why in getattr(each, "left_out", {}).items()}
    is_read = train is not None or not scored.steps
    if len(findings.problems) == before and is_read:  # whose columns the function may need
        _load_where_it_runs(findings, reward, given, known, columns_of_rows(there), left_out)
    if left_out:
        findings.notes.append(f"left out for the reward: {', '.join(left_out.values())}. {_AS_TEXT}")
    hidden = [name for name in RESPONSE if name in columns_of_rows(there)]
    if hidden:
        findings.notes.append(
            f"the rows' own {' and '.join(hidden)}: reward functions get the sampled response under this name. To hand "
            f"the column over, give it another name as well: data.map={{reference: {hidden[0]}}}"
        )


def _what_it_is(entry: RewardEntry) -> str:
    """Return an entry in words."""
    if entry.path is not None:
        file, function = entry.file_and_function
        return f"{function} of {file}"
    given = ", ".join(f"{name}={value}" for name, value in entry.kwargs.items())
    return f"{entry.name}({given})" if given else str(entry.name)


def _look_for_ground_truth(findings: Findings, name: str, taken: frozenset[str] | None, train: Any, val: Any) -> None:
    """Add a note if some rows have no ground truth for a user's own function, unless it asks for none.

    Args:
        findings: Collects notes.
        name: Of the function.
        taken: Names of what it takes; None if they are not known.
        train: Rows to train on.
        val: Rows to validate on.
    """
    if taken is not None and taken.isdisjoint(("answer", GROUND_TRUTH)):
        return
    bare = sum(len(_without_ground_truth(rows)) for rows in (train, val))
    if bare:
        what = "an answer (a column `answer`, or reward_model.ground_truth)"
        findings.notes.append(
            f"{count(bare, 'row')} without {what}: {name} gets None there{_looked_at(train)}{_looked_at(val)}"
        )


def _without_ground_truth(rows: Any) -> list[PromptRow]:
    """Return the rows without a ground truth; of a streamed data set, those of the first rows of each source."""
    known = getattr(rows, "known", ())  # a user's own class may lack it
    return [row for row in (rows.rows[index] for index in known) if row.reward_model.get(GROUND_TRUTH) is None]


def _looked_at(rows: Any) -> str:
    if not getattr(rows, "is_streamed", False):
        return ""
    return f" (looked at: {len(rows.known):,} of {len(rows):,} streamed rows)"


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
    _look_for_answers(findings, "the built-in scorers", datasets)
    return tuple(known)


def _look_for_answers(findings: Findings, whose: str, datasets: dict[str, Any]) -> None:
    """Check that every row has an answer to compare with."""
    for key, rows in datasets.items():
        lacking = _without_ground_truth(rows)
        if lacking:
            what = (
                f"has {count(len(lacking), 'row')}{_looked_at(rows)} without reward_model.ground_truth (or a "
                "column `answer`), which "
                f"{whose} compares responses with; the first is {lacking[0].origin}."
            )
            findings.problem(key, what, f"Add it, or score with a function of your own: {_FUNCTION}.path.")


def _look_at_function(findings: Findings, reward: RewardConfig, path: str, name: str) -> bool:
    """Return whether the user's file exists and defines the function, without running it."""
    of_list = reward.functions is not None
    names: set[str] | None = None
    before = len(findings.problems)
    with findings.about(_FUNCTIONS if of_list else f"{_FUNCTION}.path"):
        names = names_in_user_file(path)
    if len(findings.problems) > before:
        return False
    if names is None or name in names:
        return True
    public = sorted(one for one in names if not one.startswith("_"))
    close = nearest(name, public) or functions_in_user_file(path)[-1:]  # helper functions usually come first
    key, instead = (_FUNCTIONS, f"Write {path}:") if of_list else (f"{_FUNCTION}.name", f"Set {_FUNCTION}.name=")
    hint = f"{instead}{close[0]}?" if close else "Define it there."
    what = "names" if of_list else "is"
    findings.problem(
        key, f"{what} {name}, which {path} does not define; it has: {', '.join(public) or 'nothing'}.", hint
    )
    return False


def _load_where_it_runs(
    findings: Findings,
    reward: RewardConfig,
    given: Given,
    data_sources: tuple[str, ...],
    columns: tuple[str, ...],
    left_out: Mapping[str, str],
) -> None:
    """Load the function, or the built-in scorers of the data sources, in a reward process like those of a run."""
    if given.reward is not None:
        key = "reward"
    elif reward.functions is not None:
        key = _FUNCTIONS
    else:
        key = "data.train_files" if reward.custom_reward_function.path is None else f"{_FUNCTION}.path"
    try:
        spec = RewardSpec.of_config(reward, data_sources, given.reward, columns)
        if reward.reward_model.is_served:  # at an address that is not known yet
            reward = with_served(reward, "http://127.0.0.1:9/v1")
        with RewardPool(spec, reward.model_copy(update={"num_workers": 1})):
            pass
        limit = isolation_limit()
        if limit is not None and not spec.source.is_ours:
            findings.notes.append(
                "reward processes can read the environment and the memory of the run's other processes, secrets among "
                f"them: {limit}"
            )
    except (RewardFunctionError, ValueError) as error:
        why = f"Left out of the rows: {', '.join(left_out.values())}. {_AS_TEXT}." if left_out else ""
        findings.problem(key, f"can't be used: {sentence(str(error))}", why)
