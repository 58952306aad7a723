"""Rows of episodes, with all that they share computed once.

One optimizer step of GRPO's policy loss by `Policy.update`, on a random Llama whose layers are SmolLM2-135M's, 4 of its
30, with 8,192 words, float32 weights and products in bfloat16. The peer is hrl itself, which packs every row whole, or
computes equal prompts once and nothing else. All get the same rows and the same budget of 4,096 tokens a micro-batch.
Losses must agree to 0.001 and norms of gradients to 2 %, as products are in bfloat16; in float32 they agree to 1e-6,
which tests hold.

- nothing shared: 8 rows of 256 tokens that have nothing in common, planned as trees all the same;
- turns of their own: 8 samples of a prompt of 64 tokens, each with three turns of 32 tokens that are answered with 32;
- turns in common: the same, where four samples each go on from one's second turn, as those of an agent that asks for
  several choices at a turn do; samples that the run itself asks for have only their prompt in common;
- branches: 3 episodes of 6 turns from one prompt of 64 tokens. A turn reasons for 32 tokens, says 8, and is answered
  with 24; the chat template drops the reasoning of earlier turns, so that each turn is a row of its own.

`tokens` are those that the model computes. The last row is what the driver reads once for a batch, how much each row
has in common with which, against its limit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Case, Comparison
from bench.update import Result, world
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_cli
from hrl.models.loading import ModelSource
from hrl.models.packed_model import TokenRows
from hrl.protocol import DataProto
from hrl.trainer.ppo.old_log_probs import policy_update
from hrl.workers.policy import Policy
from hrl.workers.requests import Training

SECONDS = 60
THREADS = 1
_WORDS = 8192
_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": _WORDS,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
_MAX_TOKENS, _ROUNDS = 4096, 7
_PROMPT, _POLICY, _ENVIRONMENT, _ANSWER = 64, 32, 32, 8
_LOSS_APART, _NORM_APART = 1e-3, 0.02
_READ_LIMIT_S = 0.05

Row = tuple[np.ndarray, np.ndarray]
"""All tokens of a row, and which of them it trains, both `(L,)`."""


def cases() -> Iterator[Case | Comparison]:
    """Yield the shapes of episodes, against rows that share nothing and then against shared prompts."""
    with world(), tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**_SHAPE)).to(torch.float32).save_pretrained(name)
        for label, batch, floors in (
            ("nothing shared", _batch(_apart()), (0.9, None)),
            ("turns of their own", _batch(_group(own_from=0)), (1.0, 0.9)),
            ("turns in common", _batch(_group(own_from=2)), (1.5, 1.2)),
            ("branches", _batch(_branches()), (1.5, 1.2)),
        ):
            for (peer, kind), floor in zip((("rows whole", None), ("prompts once", False)), floors, strict=True):
                if kind is False and floor is None:
                    continue
                ours, theirs = _Packing(Path(name), batch, is_tree=True), _Packing(Path(name), batch, is_tree=kind)

                def tokens(label=label, peer=peer, a=ours.tokens, b=theirs.tokens) -> Iterator[Comparison]:
                    yield Comparison(label, f"hrl, {peer}", "tokens", a, b)

                yield Case(label, f"hrl, {peer}", ours, theirs, _equal, floor, rounds=_ROUNDS, others=tokens)
    yield _reading()


class _Packing:
    """An update that shares all beginnings, equal prompts (`is_tree` False) or nothing (None): called, takes a step."""

    def __init__(self, folder: Path, batch: DataProto, *, is_tree: bool | None) -> None:
        config = with_dtypes(compose_cli(["actor_rollout_ref.actor.optim.lr=1e-6"]), "cpu")
        actor, shares = config.actor_rollout_ref.actor, is_tree is not None
        model = ModelSource(str(folder), {}, False, shares, False, 2048)
        training = Training(optim=actor.optim, grad_clip=actor.grad_clip, total_steps=100, seed=0, run_folder=None)
        self._policy = Policy(model, training, actor.fsdp_config, device=torch.device("cpu"))
        if not is_tree:
            batch = batch.select(non_tensor_batch_keys=["uid"])
        limits = MicroBatchLimits(_MAX_TOKENS, None, "")
        plan = Planner(share_prefix=shares).update(batch, 1, limits, mini_batch_rows=len(batch), epochs=1)
        request = policy_update(config, plan, step=1, temperature=1.0, bypasses=False)
        self._request = replace(request, measures_mismatch=False).for_rank(0)
        self._batch = batch.select_idxs(plan.rows[0])
        rows, (rank,) = TokenRows.of(self._batch), plan.ranks
        packs = (
            self._policy.engine.pack(rows, picked, is_tree=rank.is_tree)
            for picked in rank.mini_batches[0].micro_batches
        )
        self.tokens = sum(packed.layout.num_tokens for packed in packs)

    def __call__(self) -> Result:
        found = self._policy.update(self._batch, self._request)
        return found["actor/pg_loss"].value, found["actor/grad_norm"].value


def _equal(ours: Result, theirs: Result) -> None:
    """Check loss and norm of the gradient."""
    assert abs(ours[0] - theirs[0]) <= _LOSS_APART, f"loss: {ours[0]:.5g} and {theirs[0]:.5g}"
    assert abs(ours[1] / theirs[1] - 1) <= _NORM_APART, f"gradient norm: {ours[1]:.5g} and {theirs[1]:.5g}"


# ---- rows --------------------------------------------------------------------------------------------------------


_RANDOM = np.random.default_rng(0)


def _words(count: int) -> np.ndarray:
    return _RANDOM.integers(_WORDS, size=count)


def _turns(count: int) -> list[tuple[np.ndarray, bool]]:
    """Return what is said in so many turns, and whether the policy says it."""
    return [(_words(size), own) for _ in range(count) for size, own in ((_POLICY, True), (_ENVIRONMENT, False))]


def _row(parts: list[tuple[np.ndarray, bool]]) -> Row:
    return np.concatenate([words for words, _ in parts]), np.concatenate([np.full(len(w), own) for w, own in parts])


def _apart() -> list[Row]:
    return [_row([(_words(_PROMPT), False), *_turns(3)]) for _ in range(8)]


def _group(own_from: int) -> list[Row]:
    """Samples of a prompt, of which four each share their turns before the `own_from`th; the first trains these."""
    prompt, rows = (_words(_PROMPT), False), []
    for _ in range(2):
        common = _turns(own_from)
        for sample in range(4):
            before = [(words, own and sample == 0) for words, own in common]
            rows.append(_row([prompt, *before, *_turns(3 - own_from)]))
    return rows


def _branches() -> list[Row]:
    """A row for each turn: the prompt, what was said before without its reasoning, and the turn."""
    prompt, rows = _words(_PROMPT), []
    for _ in range(3):
        said = [(prompt, False)]
        for _ in range(6):
            reasoning, answer = _words(_POLICY), _words(_ANSWER)
            rows.append(_row([*said, (reasoning, True), (answer, True)]))
            said += [(answer, False), (_words(_ENVIRONMENT - _ANSWER), False)]
    return rows


def _batch(rows: list[Row]) -> DataProto:
    """Return rows as they are before an update, of which every other has its advantages positive."""
    width, count = max(len(tokens) for tokens, _ in rows) - _PROMPT, len(rows)
    responses, trained, seen = (np.zeros((count, width), np.int64) for _ in range(3))
    for place, (tokens, own) in enumerate(rows):
        size = len(tokens) - _PROMPT
        responses[place, :size], trained[place, :size], seen[place, :size] = tokens[_PROMPT:], own[_PROMPT:], 1
    prompts = np.stack([tokens[:_PROMPT] for tokens, _ in rows])
    sign = np.where(np.arange(count) % 2, -1.0, 1.0)[:, None]
    columns = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": np.concatenate([np.ones_like(prompts), seen], axis=1),
        "response_mask": trained,
        "advantages": (sign * trained).astype(np.float32),
    }
    first = {prompt.tobytes(): str(place) for place, prompt in reversed([*enumerate(prompts)])}
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(column) for name, column in columns.items()},
        non_tensors={
            "uid": np.array([first[prompt.tobytes()] for prompt in prompts], object),
            "num_turns": np.full(count, 3),
        },
        meta_info={"temperature": 1.0},
    )


def _reading() -> Comparison:
    """Read what 1,024 rows of up to 2,560 tokens have in common, eight of each prompt, half of them branches."""
    random, count, prompt, response = np.random.default_rng(0), 1024, 512, 2048
    tokens = random.integers(100, 40_000, (count, prompt + response))
    tokens[:, :prompt] = np.repeat(tokens[::8, :prompt], 8, axis=0)
    for row in range(1, count, 2):
        cut = prompt + random.integers(response)
        tokens[row, :cut] = tokens[row - 1, :cut]
    mask = np.concatenate(
        [np.ones((count, prompt)), np.arange(response) < random.integers(512, response, (count, 1))], 1
    )
    parts = {"prompts": tokens[:, :prompt], "responses": tokens[:, prompt:], "attention_mask": mask.astype(np.int64)}
    batch = DataProto.from_dict(
        tensors={name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()},
        non_tensors={"uid": np.repeat(np.array([str(group) for group in range(count // 8)], object), 8)},
    )
    taken = []
    for _ in range(7):
        began = time.process_time()
        Planner(share_prefix=True).trie(batch)
        taken.append(time.process_time() - began)
    middle = sorted(taken)[3]
    return Comparison("reading 1,024 rows", "limit", "CPU seconds", middle, _READ_LIMIT_S, 1.0, rounds=(7, 1))
