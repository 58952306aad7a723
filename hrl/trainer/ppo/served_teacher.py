"""Teachers that somebody else serves: a step's samples are scored by servers, and no process of the run holds one."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from hrl.columns import object_column
from hrl.config.ppo import PPOTrainerConfig
from hrl.errors import HrlError
from hrl.protocol import DataProto
from hrl.single_controller.turns import run_apart
from hrl.workers.requests import TEACHER_IDS, TEACHER_LOG_PROBS
from hrl.workers.rollout.scoring_server import Scores, look_at_each, opened, score_each
from hrl.workers.rollout.server_http import OF_TEACHER


class NoTeacherError(HrlError, ValueError):
    """A row names none of several teachers."""


class ServedTeacher:
    """Asks the servers of `distillation.teacher_models.teacher_model.server`, of each teacher for its own rows.

    Args:
        config: Of the run.
        vocabulary: Number of tokens that the policy has.
    """

    def __init__(self, config: PPOTrainerConfig, vocabulary: int) -> None:
        self._config = config
        self._vocabulary = vocabulary

    def score(self, batch: DataProto, num_top: int) -> DataProto:
        """Return `ref_log_prob (B, R)` of the trained tokens and, of `num_top` tokens each, what a loss reads of them.

        Args:
            batch: `prompts`, `responses`, `attention_mask` and `response_mask`; of several teachers also
                `data_source` and `columns`, one of which names a row's teacher.
            num_top: How many of the likeliest tokens are wanted; 0 wants none.

        Raises:
            ServerError: No server of a teacher is left, or one answers with something else than scores.
            NoTeacherError: A row names none.
        """
        columns = batch.batch
        width = columns["prompts"].shape[1]
        trained = columns["response_mask"].bool().numpy()
        masks, ids = columns["attention_mask"].bool().numpy(), torch.cat([columns["prompts"], columns["responses"]], 1)
        # Nothing is asked of a row without a trained token, and no row goes further than its last one.
        rows = np.flatnonzero(trained.any(1)).tolist()
        ends = trained.shape[1] - trained[:, ::-1].argmax(1)
        texts: dict[tuple[str, ...], dict[int, tuple[list[int], int]]] = {}
        for row in rows:
            tokens = ids[row, : width + int(ends[row])].numpy()[masks[row, : width + int(ends[row])]]
            length = int(masks[row, :width].sum())
            own = texts.setdefault(self._servers_of(batch, row), {})
            own[row] = tokens.tolist(), length + int(trained[row].argmax())
        scores = run_apart(self._ask_all(texts, num_top), "teacher")
        log_probs = torch.zeros(trained.shape, dtype=torch.float32)
        none = (np.empty((0, num_top), np.float32), np.empty((0, num_top), np.int32))
        likeliest = [none] * len(batch)
        for row, found in scores.items():
            start = int(trained[row].argmax())
            places = np.flatnonzero(trained[row]) - start
            log_probs[row, torch.from_numpy(places + start)] = torch.from_numpy(found.log_probs[places])
            likeliest[row] = (found.top_log_probs[places], found.top_ids[places])
        others = {
            name: object_column([of_row[index] for of_row in likeliest])
            for index, name in enumerate((TEACHER_LOG_PROBS, TEACHER_IDS))
        }
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs}, non_tensors=others if num_top else {})

    def _servers_of(self, batch: DataProto, row: int) -> tuple[str, ...]:
        distilled = self._config.distillation
        urls = distilled.teacher_models.teacher_model.server.urls
        if not isinstance(urls, dict):
            return tuple(urls)
        objects = batch.non_tensor_batch
        name = distilled.named_in(objects["data_source"][row], objects["columns"][row])
        if name not in urls:
            raise NoTeacherError(
                f"a row has {distilled.teacher_key}={str(name)[:100]}, and {OF_TEACHER}.urls names servers for "
                f"{', '.join(urls)}: add some, or leave such rows out"
            )
        return tuple(urls[name])

    async def _ask_all(
        self, texts: dict[tuple[str, ...], dict[int, tuple[list[int], int]]], num_top: int
    ) -> dict[int, Scores]:
        """Return the scores of each row; the teachers work side by side."""
        asked = await asyncio.gather(*(self._ask(urls, [*own.values()], num_top) for urls, own in texts.items()))
        rows = [row for own in texts.values() for row in own]
        return dict(zip(rows, (scores for found in asked for scores in found), strict=True))

    async def _ask(self, urls: tuple[str, ...], texts: list[tuple[list[int], int]], num_top: int) -> list[Scores]:
        config = self._config
        async with opened(
            config.distillation.teacher_models.teacher_model,
            urls,
            vocabulary=self._vocabulary,
            timeout_s=config.trainer.timeouts.rank_call_s,
            most_at_once=config.actor_rollout_ref.rollout.max_num_seqs,
        ) as servers:
            await look_at_each(servers, config.data.max_prompt_length + config.data.max_response_length)
            return await score_each(servers, texts, num_top)
