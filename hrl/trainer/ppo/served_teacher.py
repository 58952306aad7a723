"""A teacher that somebody else serves: a step's samples are scored by servers, and no process of the run holds it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hrl.columns import object_column
from hrl.config.ppo import PPOTrainerConfig
from hrl.protocol import DataProto
from hrl.workers.requests import TEACHER_IDS, TEACHER_LOG_PROBS
from hrl.workers.rollout.scoring_server import Scores, look_at_each, opened, score_each


class ServedTeacher:
    """Asks the servers of `distillation.teacher_models.teacher_model.server`.

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
            batch: `prompts`, `responses`, `attention_mask` and `response_mask`.
            num_top: How many of the likeliest tokens are wanted; 0 wants none.

        Raises:
            ServerError: No server is left, or one answers with something else than scores.
        """
        columns = batch.batch
        width = columns["prompts"].shape[1]
        trained = columns["response_mask"].bool().numpy()
        masks, ids = columns["attention_mask"].bool().numpy(), torch.cat([columns["prompts"], columns["responses"]], 1)
        # Nothing is asked of a row without a trained token, and no row goes further than its last one.
        rows = np.flatnonzero(trained.any(1)).tolist()
        ends = trained.shape[1] - trained[:, ::-1].argmax(1)
        texts = []
        for row in rows:
            tokens = ids[row, : width + int(ends[row])].numpy()[masks[row, : width + int(ends[row])]]
            length = int(masks[row, :width].sum())
            texts.append((tokens.tolist(), length + int(trained[row].argmax())))
        with ThreadPoolExecutor(1, "teacher") as apart:  # a notebook has a loop of its own in this thread
            scores = apart.submit(asyncio.run, self._ask(texts, num_top)).result()
        log_probs = torch.zeros(trained.shape, dtype=torch.float32)
        none = (np.empty((0, num_top), np.float32), np.empty((0, num_top), np.int32))
        likeliest = [none] * len(batch)
        for row, found in zip(rows, scores, strict=True):
            start = int(trained[row].argmax())
            places = np.flatnonzero(trained[row]) - start
            log_probs[row, torch.from_numpy(places + start)] = torch.from_numpy(found.log_probs[places])
            likeliest[row] = (found.top_log_probs[places], found.top_ids[places])
        others = {
            name: object_column([of_row[index] for of_row in likeliest])
            for index, name in enumerate((TEACHER_LOG_PROBS, TEACHER_IDS))
        }
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs}, non_tensors=others if num_top else {})

    async def _ask(self, texts: list[tuple[list[int], int]], num_top: int) -> list[Scores]:
        config = self._config
        async with opened(
            config.distillation.teacher_models.teacher_model,
            vocabulary=self._vocabulary,
            timeout_s=config.trainer.timeouts.rank_call_s,
            most_at_once=config.actor_rollout_ref.rollout.max_num_seqs,
        ) as servers:
            await look_at_each(servers, config.data.max_prompt_length + config.data.max_response_length)
            return await score_each(servers, texts, num_top)
