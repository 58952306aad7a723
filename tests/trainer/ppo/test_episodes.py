"""What episodes are worth: rewards of turns, of functions, and what does not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.columns import object_column
from hrl.config import PPOTrainerConfig
from hrl.config.environment import EnvironmentConfig
from hrl.episodes.play import EpisodeError
from hrl.episodes.service import EpisodeServiceError
from hrl.errors import may_pass
from hrl.metrics import StepMetrics
from hrl.models.tokenizer import TokenIds
from hrl.protocol import DataProto
from hrl.reward.combine import CombinedScores, RewardShaping
from hrl.reward.pool import RewardOutcome
from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.ppo.advantage import compute_advantage
from hrl.trainer.ppo.episodes import (
    EpisodeDriver,
    heads_of,
    require_sampled,
    score_episodes,
    tasks_of,
    values_behind_truncations,
)
from hrl.trainer.ppo.generation import Asked, count_troubles, prompt_batch, seed_of
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.ppo.rewards import RewardService
from hrl.workers.requests import SampleRequest, SamplingParams


class Rewards:
    """Pays every last answer what it is told to; None leaves it out."""

    gives_scores = True

    def __init__(self, *scores: float | None, turn_scores: Sequence[Sequence[float] | None] = ()) -> None:
        self._scores, self._turn_scores = scores, turn_scores
        self.lengths: list[int] = []

    def collect(
        self, batch: DataProto, metrics: StepMetrics, *, validate: bool, of_environment, lengths, counts
    ) -> CombinedScores:
        assert len(batch) == len(self._scores), "an episode is scored once"
        self.lengths = lengths.tolist()
        kept = counts & torch.tensor([score is not None for score in self._scores])
        scores = torch.tensor([score or 0.0 for score in self._scores])
        batch.non_tensor_batch["reward_parts"] = object_column([{"n": place} for place in range(len(batch))])
        plain = scores + of_environment.nan_to_num()
        return CombinedScores(scores, kept, torch.zeros(len(batch)), plain, self._turn_scores)


def batch_of(ends: tuple[str, str] = ("done", "done")) -> DataProto:
    """An episode of two branches and two turns, and one of a single turn."""
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]),
            "turn_index": torch.tensor([[0, 0, 0, -1], [0, 0, 0, 1], [0, -1, -1, -1]]),
            "rollout_versions": torch.tensor([[3, 3, -1, -1], [-1, -1, -1, 3], [3, -1, -1, -1]]),
        },
        non_tensors={
            "uid": object_column(["a", "a", "b"]),
            "sample_index": object_column([0, 0, 0]),
            "branch": object_column([0, 1, 0]),
            "turn_rewards": object_column([[0.25, 1.0], [0.25, 1.0], [None]]),
            "token_rewards": object_column([(), (), ()]),
            "end": object_column([ends[0], ends[0], ends[1]]),
        },
    )


def scored(batch: DataProto, rewards: Rewards, validate: bool = False, **settings: object):
    config = EnvironmentConfig(path="x", **settings)
    return score_episodes(batch, rewards, config, StepMetrics(), validate=validate)


def seeds_of(step: int, *, validate: bool = False, rows: Sequence[int] = (3, 8)) -> list[tuple[int, int]]:
    """The seeds of the environments that a step, or a validation, asks for; two samples of each row."""
    given: dict[str, Sequence[object]] = {"index": rows, "raw_prompt": [[]] * len(rows), "columns": [{}] * len(rows)}
    given |= {name: [None] * len(rows) for name in ("data_source", "reward_model", "extra_info")}
    prompts = DataProto.from_dict(
        tensors={name: torch.ones(len(rows), 1, dtype=torch.int64) for name in ("prompts", "attention_mask")},
        non_tensors={name: object_column(values) for name, values in given.items()},
    )
    asked = prompt_batch(prompts, 2, step=step, validate=validate, with_greedy=not validate)
    request: SampleRequest[Any] = SampleRequest(
        plan=None,
        sampling=SamplingParams(),
        seed=seed_of(1, validate=validate),
        step=step,
        with_greedy=not validate,
        reward_round=None,
    )
    return [task.environment_seeds for task in tasks_of(Asked(prompts, asked, request, validate))]


def test_the_samples_of_a_prompt_are_compared_in_one_game_and_validations_play_theirs_again() -> None:
    trained = [seeds_of(step) for step in (1, 2)]
    for seeds in trained:
        one, same, other, too, *greedy = (seed for seed, _ in seeds)
        assert one == same != other == too and greedy == [one, other]
    assert len({seed for seeds in trained for seed, _ in seeds}) == 4, "each prompt and each step has a game of its own"
    assert len({of_sample for seeds in trained for _, of_sample in seeds}) == 12
    held_out = seeds_of(1, validate=True)
    assert held_out == seeds_of(2, validate=True) == seeds_of(2, validate=True, rows=[8, 3])[2:] + held_out[2:]
    assert [seed for seed, _ in held_out[::2]] == [seed for seed, _ in held_out[1::2]]
    assert len({seed for pair in (*held_out, *trained[0]) for seed in pair}) == 6 + 8


def test_rewards_of_turns_stand_on_their_turns_and_the_functions_on_the_episodes_last_token() -> None:
    batch = batch_of()
    found = scored(batch, Rewards(2.0, 3.0))
    assert found.tokens.tolist() == [[0, 0.25, 0, 0], [0, 0, 0, 3.0], [3.0, 0, 0, 0]]
    assert found.scores.tolist() == [3.25, 3.25, 3.0] == found.plain.tolist()
    assert batch.non_tensor_batch["reward_parts"].tolist() == [{"n": 0}, {"n": 0}, {"n": 1}]
    assert heads_of(batch).tolist() == [1, 2]


def test_scores_that_functions_give_to_turns_stand_on_these_beside_the_environments() -> None:
    batch = batch_of()
    found = scored(batch, Rewards(2.0, 3.0, turn_scores=[[0.5, -0.5], None]))
    assert found.tokens.tolist() == [[0, 0.75, 0, 0], [0, 0, 0, 2.5], [3.0, 0, 0, 0]]
    assert found.scores.tolist() == [3.25, 3.25, 3.0]
    assert batch.non_tensor_batch["turn_rewards"].tolist() == [[0.75, 0.5], [0.75, 0.5], [None]]
    batch.batch["token_level_rewards"] = found.tokens
    batch.non_tensor_batch |= {"uid": object_column(["a"] * 3), "sample_index": object_column([0, 0, 1])}
    advantages = compute_advantage(batch, "grpo_turns", norm_adv_by_std_in_grpo=False).batch["advantages"]
    # The turns of the group have 0.75, 2.5 and 3: a mean of 6.25 / 3. A token has what is ahead in its episode.
    first, second, alone = (reward - 6.25 / 3 for reward in (0.75, 2.5, 3.0))
    expected = [[first + second, first + second, 0, 0], [0, 0, 0, second], [alone, 0, 0, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_rewards_of_tokens_stand_on_these_beside_what_functions_give_and_are_what_is_ahead_of_each() -> None:
    """Turn 0 of the first episode has two tokens worth 0.5 and -0.25, turn 1 a token worth 1; the function gives 2."""
    batch, metrics = batch_of(), StepMetrics()
    batch.non_tensor_batch["token_rewards"] = object_column([((0.5, -0.25), None), ((0.5, -0.25), None), ()])
    rewards = Rewards(2.0, 3.0, turn_scores=[[0.125, 0.0], None])
    found = score_episodes(batch, rewards, EnvironmentConfig(path="x"), metrics, validate=False)
    assert found.tokens.tolist() == [[0.5, -0.125, 0, 0], [0, 0, 0, 3.0], [3.0, 0, 0, 0]]
    assert found.scores.tolist() == [3.375, 3.375, 3.0]
    assert batch.non_tensor_batch["turn_rewards"].tolist() == [[0.375, 1.0], [0.375, 1.0], [None]]
    assert (metrics["episode/rewards_moved"], metrics["episode/rewards_lost"]) == (0.0, 0.0)
    batch.batch["token_level_rewards"], batch.batch["values"] = found.tokens, torch.zeros(3, 4)
    returns = compute_advantage(batch, "gae", gamma=1.0, lam=1.0).batch["returns"]
    assert returns.tolist() == [[3.375, 2.875, 0, 0], [0, 0, 0, 3.0], [3.0, 0, 0, 0]]


def test_rewards_of_tokens_that_are_not_trained_are_lost_as_that_of_their_turn() -> None:
    batch, metrics = batch_of(), StepMetrics()
    batch.non_tensor_batch["token_rewards"] = object_column([((0.5, -0.25), None), ((0.5, -0.25), None), ()])
    found = score_episodes(batch, Rewards(None, 3.0), EnvironmentConfig(path="x"), metrics, validate=False)
    assert found.tokens[:2].abs().sum() == 0 and metrics["episode/rewards_lost"] == 2.0


def test_an_episode_that_is_left_out_trains_nothing_in_any_of_its_rows() -> None:
    batch = batch_of()
    found = scored(batch, Rewards(None, 3.0))
    assert batch.batch["response_mask"].tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 0]]
    assert found.kept.tolist() == [False, False, True] and found.tokens[:2].abs().sum() == 0


@pytest.mark.parametrize(
    ("end", "settings", "validate", "counts"),
    [
        ("failed", {}, False, False),
        ("failed", {}, True, False),
        ("deadline", {}, False, False),
        ("deadline", {}, True, False),
        ("deadline", {"on_truncation": "bootstrap"}, False, False),
        ("max_turns", {}, False, True),
        ("max_turns", {"on_truncation": "mask"}, False, False),
        ("max_turns", {"on_truncation": "mask"}, True, True),
        ("done", {"on_truncation": "mask"}, False, True),
        ("done", {"on_truncation": "score"}, False, True),
        ("done", {"on_truncation": "bootstrap"}, False, True),
    ],
)
def test_which_ends_count(end: str, settings: dict, validate: bool, counts: bool) -> None:
    batch = batch_of(ends=(end, "done"))
    found = scored(batch, Rewards(2.0, 3.0), validate, **settings)
    assert found.kept.tolist() == [counts, counts, True]
    assert bool(batch.batch["response_mask"][:2].any()) is counts


def test_a_group_whose_rows_are_episodes_of_one_row_is_as_it_was() -> None:
    batch = batch_of().select_idxs([2])
    found = scored(batch, Rewards(3.0))
    assert found.tokens.tolist() == [[3.0, 0, 0, 0]] and SimpleNamespace(scores=found.scores.tolist()).scores == [3.0]


def test_a_length_penalty_counts_the_longest_row_of_an_episode_as_the_limit_does() -> None:
    """Rows of 3 and 4 tokens, of which 2 and 1 are the policy's; the limit is of 4 tokens for a row, and cut one."""
    rewards = Rewards(2.0, 3.0)
    scored(batch_of(), rewards)
    assert rewards.lengths == [4, 1]
    scored(batch_of(ends=("done", "max_tokens")), rewards)
    assert rewards.lengths == [4, 4]
    for end in ("max_turns", "max_prompt"):
        scored(batch_of(ends=("done", end)), rewards)
        assert rewards.lengths == [4, 1]


def test_a_score_of_an_episode_whose_last_row_trains_nothing_stands_on_its_last_trained_token() -> None:
    batch = batch_of()
    batch.batch["response_mask"][1] = 0
    assert scored(batch, Rewards(2.0, 3.0)).tokens.tolist() == [[0, 3.25, 0, 0], [0] * 4, [3.0, 0, 0, 0]]


@pytest.mark.parametrize("end", ["max_turns", "max_prompt", "max_tokens", "truncated"])
def test_an_episode_that_was_cut_off_ends_in_the_value_behind_its_last_row(end: str) -> None:
    asked: list[list[list[int]]] = []

    def last_values(rows: DataProto) -> torch.Tensor:
        asked.append(rows.batch["response_mask"].tolist())
        return torch.tensor([7.0])

    assert values_behind_truncations(batch_of(ends=(end, "done")), last_values).tolist() == [7, 7, 0]
    assert asked == [[[0, 0, 0, 1]]]
    for end in ("failed", "deadline", "done"):
        assert values_behind_truncations(batch_of(ends=(end, "done")), last_values).tolist() == [0, 0, 0]
    assert len(asked) == 1, "a critic is not asked about nothing"


def test_a_batch_in_which_nobody_sampled_anything_ends_the_run_with_how_its_episodes_ended() -> None:
    batch = batch_of(ends=("deadline", "failed"))
    batch.non_tensor_batch["episode_error"] = object_column([None, None, "no such drawer"])
    config = PPOTrainerConfig.model_validate({"environment": {"path": "x.py:X", "episode_timeout_s": 90}})
    require_sampled(batch, config)
    batch.batch["rollout_versions"][:] = -1
    with pytest.raises(EpisodeError) as end:
        require_sampled(batch, config)
    assert str(end.value) == (
        "the policy sampled nothing in any of 2 episodes. How they ended: 1 deadline "
        "(environment.episode_timeout_s=90), 1 failed. The first that failed: no such drawer. `hrl env-test` plays "
        "some of them alone, and shows how long calls take"
    )


def test_troubles_are_counted_by_episode() -> None:
    batch = batch_of(ends=("max_turns", "done"))
    batch.non_tensor_batch["finish_reason"] = object_column(["length", "length", "stop"])
    found = {name: metric.result() for name, metric in count_troubles(batch).items()}
    assert found == {
        "rollout/empty_responses": 0,
        "rollout/aborted_responses": 0,
        "rollout/truncated_responses": 1,
    }


def test_the_head_of_an_episode_is_the_row_with_its_last_turn_wherever_it_stands() -> None:
    batch = batch_of()
    batch.batch["turn_index"] = torch.tensor([[0, 2, -1, -1], [0, 0, 1, 1], [0, -1, -1, -1]])
    batch.batch["rollout_versions"] = torch.tensor([[3, 3, -1, -1], [-1, -1, 3, 3], [3, -1, -1, -1]])
    assert heads_of(batch).tolist() == [0, 2], "a program that talks to the policy in two chats by turns"


@pytest.mark.parametrize(("gives_scores", "num_unpaid"), [(False, 2.0), (True, 0.0)])
def test_episodes_that_nobody_pays_are_worth_nothing_and_counted(gives_scores: bool, num_unpaid: float) -> None:
    batch, metrics = batch_of(), StepMetrics()
    batch.non_tensor_batch["turn_rewards"] = object_column([[None, None], [None, None], [None]])
    rewards = Rewards(0.0, 0.0)
    rewards.gives_scores = gives_scores
    found = score_episodes(batch, rewards, EnvironmentConfig(path="x"), metrics, validate=False)
    assert found.tokens.abs().sum() == 0 and found.kept.all() and metrics["episode/num_unpaid"] == num_unpaid


def test_what_an_episode_without_a_token_was_paid_is_counted_as_lost() -> None:
    batch, metrics = batch_of(), StepMetrics()
    batch.batch["response_mask"][2] = 0
    batch.non_tensor_batch["turn_rewards"][2] = [0.5]
    config = EnvironmentConfig(path="x")
    score_episodes(batch, Rewards(0.0, 0.0), config, metrics, validate=False)
    assert metrics["episode/rewards_lost"] == 1.0


def test_scores_of_turns_reach_the_batch_from_the_functions_and_count_in_validation() -> None:
    service = RewardService.__new__(RewardService)
    config = PPOTrainerConfig.model_validate({"environment": {"path": "x.py:X"}})
    outcomes = [
        RewardOutcome("ok", 1.0, {"turn_scores": 0.75}, turn_scores=[0.5, 0.25]),
        RewardOutcome("ok", 2.0),
    ]
    service._reward, service._has_model, service._deadline_s = config.reward, False, 1.0
    service._loop = SimpleNamespace(collect=lambda *_: outcomes)  # type: ignore[assignment]
    service._spec = SimpleNamespace()  # type: ignore[assignment]
    service._max_response_tokens, service._rounds = 4, {False: (1, "step 1"), True: (0, "")}
    service.shaping = RewardShaping({})
    metrics = StepMetrics()
    combined = service.collect(
        batch_of().select_idxs([1, 2]), metrics, of_environment=torch.tensor([1.0, 0.0]), lengths=torch.tensor([2, 1])
    )
    assert combined.scores.tolist() == [1.0, 2.0] and combined.turn_scores == [[0.5, 0.25], None]
    assert combined.plain.tolist() == [2.75, 2.0]
    assert metrics["reward/turn_scores/mean"] == 0.75


def reward_service(*, has_model: bool) -> RewardService:
    """The driver's side of rewards, without a reward function."""
    service = RewardService.__new__(RewardService)
    config = PPOTrainerConfig.model_validate({"environment": {"path": "x.py:X"}})
    service._reward, service._loop, service._has_model = config.reward, None, has_model
    service._spec = None
    service._max_response_tokens, service._rounds = 4, {False: (1, "step 1"), True: (0, "")}
    service.shaping = RewardShaping({})
    return service


def test_rewards_of_episodes_that_do_not_count_are_in_no_statistic() -> None:
    service = reward_service(has_model=False)
    batch, metrics = batch_of().select_idxs([1, 2]), StepMetrics()
    counts = torch.tensor([True, False])
    combined = service.collect(
        batch, metrics, of_environment=torch.tensor([1.0, -100.0]), lengths=torch.tensor([2, 1]), counts=counts
    )
    assert combined.kept.tolist() == [True, False] and combined.plain.tolist() == [1.0, 0.0]
    assert "reward/environment/mean" not in metrics, "it is all of the reward"


def test_what_an_environment_paid_is_a_part_of_the_reward_beside_others_where_it_paid_anybody() -> None:
    service = reward_service(has_model=True)
    batch, metrics = batch_of(), StepMetrics()
    batch.batch["rm_scores"] = torch.tensor([0.5, 0.25, 2.0])
    combined = service.collect(batch, metrics, of_environment=torch.tensor([1.0, math.nan, 0.0]), lengths=torch.ones(3))
    assert combined.plain.tolist() == [1.5, 0.25, 2.0]
    assert [part.get("environment") for part in batch.non_tensor_batch["reward_parts"]] == [1.0, 0.0, 0.0]
    assert metrics["reward/environment/mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("seen", "is_dead", "told"),
    [
        (EpisodeServiceError("the process that plays the episodes is gone"), True, "SIGSTOP"),
        (EpisodeServiceError("the process that plays the episodes is gone"), False, "rank 0: serve"),
        (RuntimeError("out of blocks"), True, "rank 0: serve"),
    ],
)
def test_the_end_of_the_service_is_told_as_the_driver_knows_it_and_what_fails_on_a_rank_as_the_rank_does(
    seen: Exception, is_dead: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def collect(self, batch: int) -> None:
            raise AssertionError("episodes that no rank serves are never over")

        def require_alive(self) -> None:
            if is_dead:
                raise EpisodeServiceError("the episode service (process 7) died: SIGSTOP")

        def begin(self, *_: object) -> None: ...

        def inbox(self, batch: int) -> None: ...

    def serve_requests(_: object) -> None:
        raise WorkerError(0, "serve", "serve", str(seen)) from seen

    monkeypatch.setattr("hrl.trainer.ppo.episodes.EpisodeActor", lambda _: Gone())
    monkeypatch.setattr("hrl.trainer.ppo.episodes.tasks_of", lambda _: [])
    config = PPOTrainerConfig.model_validate({"environment": {"path": "single_turn"}})
    driver = EpisodeDriver(config, None, "", TokenIds(0, (0,), 1))
    driver.begin_start(None)
    asked = SimpleNamespace(request=SimpleNamespace(reward_round=None))
    engines = SimpleNamespace(world_size=1, serve_requests=serve_requests)
    with pytest.raises((EpisodeServiceError, WorkerError), match=told) as end:
        driver.play(asked, engines, StepMetrics())  # type: ignore[arg-type]
    assert may_pass(end.value) == isinstance(seen, EpisodeServiceError)


def test_the_key_for_others_goes_with_the_run_even_where_the_service_fails_to_shut_down(tmp_path: Path) -> None:
    class Stuck:
        def shutdown(self) -> None:
            raise RuntimeError("stuck")

    driver = EpisodeDriver.__new__(EpisodeDriver)
    driver._actor, driver._address = Stuck(), tmp_path / "serving.env"
    driver._address.write_text("KEY=1")
    with pytest.raises(RuntimeError, match="stuck"), driver:
        pass
    assert not (tmp_path / "serving.env").exists()


@pytest.mark.parametrize("serve", [False, True])
def test_episodes_are_told_who_scores_them_also_where_functions_ask_a_server_that_the_run_starts(
    serve: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []

    class Functions:
        sink = None if serve else "at once"

        def start(self, served: str | None) -> None:
            assert served == ("http://judge" if serve else None)
            self.sink = self.sink or "when the server was there"

    class Episodes:
        def begin_start(self, rewards: object) -> None:
            begun.append(rewards)

        def start(self) -> None:
            assert len(begun) == 1

        def open_to_others(self, folder: Path) -> None: ...

    model = {"enable": serve, "serve": serve, "model_path": "judge"}
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config = PPOTrainerConfig.model_validate({"reward": {"reward_model": model}})
    trainer.rewards, trainer.episodes = Functions(), Episodes()  # type: ignore[assignment]
    trainer._workers = SimpleNamespace(rm=SimpleNamespace(address=lambda: [None, "http://judge"]))  # type: ignore[assignment]
    note = SimpleNamespace(note=lambda text: None)
    trainer.reporter = SimpleNamespace(console=note, folder=SimpleNamespace(path=tmp_path))  # type: ignore[assignment]
    monkeypatch.setattr(TrainingLoop, "init_workers", lambda _: None)
    trainer.init_workers()
    assert begun == ["when the server was there" if serve else "at once"]


def test_a_model_that_the_run_serves_adds_to_what_an_environment_pays() -> None:
    served = {"enable": True, "serve": True, "model_path": "judge"}
    paid = {"environment": {"path": "mine.py:Game"}}
    assert PPOTrainerConfig.model_validate(paid).reward_entries == ()
    (asks,) = PPOTrainerConfig.model_validate(paid | {"reward": {"reward_model": served}}).reward_entries
    assert (asks.name, asks.part) == ("remote", "reward_model")
