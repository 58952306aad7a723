"""A trainer whose workers, rewards and data are stand-ins that give hand-made numbers."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from hrl.batching.planner import rows_of_first_step
from hrl.config import compose_cli
from hrl.data.order import EpochOrder, fingerprint
from hrl.metrics import Metric, StepMetrics
from hrl.protocol import DataProto
from hrl.report.console import RunConsole
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder
from hrl.reward.combine import CombinedScores, RewardShaping, combine_scores
from hrl.trainer.kinds import KINDS
from hrl.workers.engine.background import write_record
from hrl.workers.engine.digest import Written
from tests.reward.settings import reward

FUNCTION_SCORES = [1.0, None, 0.0]


class Prompts:
    """Prompts of two tokens."""

    has_pictures = False

    def __init__(self, count: int = 3) -> None:
        self.order = EpochOrder(count, seed=0)
        self.fingerprint = fingerprint(self.order, [np.ones(2)] * count)

        self.data_sources = ("sums",)

    def __len__(self) -> int:
        return self.order.num_rows

    def draw(self, position: Any, batch_size: int) -> Any:
        return self.order.next(position, batch_size)

    def metrics(self) -> dict[str, float]:
        return {}

    def batch(self, indices: Any) -> DataProto:
        rows = list(indices)
        return DataProto.from_dict(
            tensors={"prompts": torch.ones(len(rows), 2, dtype=torch.int64)},
            non_tensors={
                "index": np.array(rows, dtype=object),
                "data_source": np.array(["sums"] * len(rows), dtype=object),
                "reward_model": np.array([{}] * len(rows), dtype=object),
            },
        )


class Workers:
    """Every role at once: a response is two tokens, the reward model says 5, and what is done is noted.

    Attributes:
        sampler, trainer: what each takes for the log-prob of every token.
        sampled, scored, learnt: the batches that were asked for, given log-probs and learnt from.
        draws: the requests for samples.
        begun: those that were made ahead.
        asked: the requests of the updates.
    """

    world_size = 1

    def __init__(self, sampler: float = -1.0, trainer: float = -1.0) -> None:
        self.done: list[str] = []
        self.actor = self.rollout = self.rm = self.critic = self
        self.version = 0
        self.sampler, self.trainer = sampler, trainer
        self.sampled: list[DataProto] = []
        self.scored: list[DataProto] = []
        self.learnt: list[DataProto] = []
        self.draws: list[Any] = []
        self.begun: list[Any] = []
        self.asked: list[Any] = []
        self.trained: list[Any] = []

    @property
    def plan(self) -> Any:
        """Of the last update."""
        return self.asked[-1].plan

    def peak_memory(self) -> list[dict[str, Metric]]:
        return []

    def sync_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        self.version = version
        return {}

    def sleep_rollout(self) -> None:
        self.done.append("sleep")

    def begin_sampling(self, rows: DataProto, request: Any) -> None:
        self.begun.append(request)

    def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
        self.done.append("generate")
        self.sampled.append(rows)
        self.draws.append(request)
        ones = torch.ones(len(rows), 2, dtype=torch.int64)
        return DataProto.from_dict(
            tensors={
                "prompts": ones,
                "responses": ones,
                "attention_mask": torch.ones(len(rows), 4, dtype=torch.int64),
                "response_mask": ones.clone(),
                "rollout_log_probs": torch.full((len(rows), 2), self.sampler),
            },
            non_tensors={"finish_reason": np.array(["length"] + ["stop"] * (len(rows) - 1), dtype=object)},
            meta_info={"temperature": 1.0, "policy_version": self.version},
        )

    def compute_log_prob(self, batch: DataProto, request: Any) -> DataProto:
        self.done.append("log_prob")
        self.scored.append(batch)
        columns = {"old_log_probs": torch.full((len(batch), 2), self.trainer) * batch.batch["response_mask"]}
        if request.with_entropy:
            columns["entropys"] = torch.full((len(batch), 2), 0.25)
        if request.with_sum_pi_squared:
            columns["sum_pi_squared"] = torch.full((len(batch), 2), 0.5)
        return DataProto.from_dict(tensors=columns)

    def compute_rm_score(self, batch: DataProto, request: Any) -> DataProto:
        self.done.append("reward model")
        return DataProto.from_dict(tensors={"rm_scores": torch.full((len(batch),), 5.0)})

    def update_actor(self, batch: DataProto, request: Any) -> list[dict[str, Metric]]:
        self.done.append("update")
        assert request.columns <= {*batch.batch.keys(), *batch.non_tensor_batch}
        self.learnt.append(batch)
        self.asked.append(request)
        if not request.measures_mismatch:
            return []
        count = int(batch.batch["response_mask"][rows_of_first_step(request.plan)].sum())
        return [{"rollout/logprob_diff_mean": Metric.mean(count * abs(self.trainer - self.sampler), count)}]

    def ranks(self) -> dict[str, int]:
        return {"actor": 1}

    def save(self, folder: Path, contents: list[str]) -> list[Path]:
        (folder / "weights").write_text("w")
        write_record(folder / "written.json", [Written.by_reading(folder / "weights")])
        return [folder / "written.json"]

    def finish_save(self, *, wait: bool = True) -> None:
        pass

    def abandon_save(self) -> None:
        self.done.append("abandon save")

    def bytes_to_save(self, contents: list[str]) -> dict[str, int]:
        return {"model": 20_000_000}

    def load(self, folder: Path) -> None:
        self.done.append("load")


class Rewards:
    """A reward function that gives the samples of a batch these scores, in their order; weighed with 10."""

    scores_steps = scores_validations = True

    def __init__(self, function_scores: list[float | None] | None) -> None:
        self.function_scores = function_scores
        self.shaping = RewardShaping({"scale": None})

    @property
    def sink(self) -> object | None:
        return None if self.function_scores is None else self

    def begin(self, rows: DataProto, step: int, *, validate: bool) -> int:
        return 10 * step + validate

    def scores_of(self, batch: DataProto) -> list[float | None] | None:
        return self.function_scores

    def parts_of(self, batch: DataProto) -> list[dict[str, Any]]:
        return [{} for _ in range(len(batch))]

    def outcomes(self, *, validate: bool = False) -> list[SimpleNamespace]:
        return [SimpleNamespace(score=score) for score in self.function_scores or ()]

    def collect(
        self, batch: DataProto, metrics: StepMetrics, *, validate: bool = False, outcomes: Any = None
    ) -> CombinedScores:
        model = batch.batch["rm_scores"] if "rm_scores" in batch.batch.keys() else None
        scores, lengths = self.scores_of(batch), torch.full((len(batch),), 2)
        tenfold = None if scores is None else [None if score is None else 10 * score for score in scores]
        combined = combine_scores(tenfold, model, lengths, 2, reward())
        combined = replace(combined, plain=combine_scores(scores, model, lengths, 2, reward()).plain)
        batch.non_tensor_batch["reward_parts"] = np.array(self.parts_of(batch), dtype=object)
        if not combined.kept.all() and outcomes is None:
            batch.batch["response_mask"] = batch.batch["response_mask"] * combined.kept[:, None]
        return combined


class Words:
    """A tokenizer."""

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return ["one" for _ in rows]


class Driver:
    """A trainer on stand-ins."""

    def __init__(
        self,
        path: Path,
        *overrides: str,
        steps: int = 2,
        scores: list[float | None] | None = FUNCTION_SCORES,
        prompts: int = 3,
        workers: Workers | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        config = compose_cli(
            [
                f"trainer.default_local_dir={path}",
                "data.train_batch_size=3",
                "actor_rollout_ref.actor.ppo_mini_batch_size=3",
                "actor_rollout_ref.rollout.n=1",
                "algorithm.adv_estimator=reinforce_plus_plus",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
                *overrides,
            ]
        )
        self.shown_file = io.StringIO()
        console = RunConsole(Console(file=self.shown_file, width=200, color_system=None))
        console.expect(steps, KINDS["ppo"].line(config))
        keeps = config.trainer.on_save_error == "continue"
        self.folder = RunFolder(path, resume=True, keeps_refused=keeps)
        self.workers = workers or Workers()
        self.trainer = KINDS["ppo"].trainer(config)(
            config,
            Words(),
            {},
            SimpleNamespace(),
            train_dataset=Prompts(prompts),
            val_dataset=Prompts(),
            rewards=rewards or Rewards(scores),
            reporter=RunReporter(self.folder, console, config.trainer, config.model_dump(mode="json")),
            total_training_steps=steps,
        )
        self.trainer._workers = self.workers

    @property
    def shown(self) -> str:
        return self.shown_file.getvalue()

    def fit(self) -> None:
        self.trainer.fit()
        self.folder.close()
