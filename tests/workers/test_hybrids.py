"""Models whose layers carry a state along the row: padded rows give what each row alone gives, on one rank and on two.

What is compared with is transformers' own forward of one unpadded row at a time, in float64.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel, masking_utils

from hrl.algos.preference import PairOptions
from hrl.batching.plan import BatchPlan, RankPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.models.experts import use_grouped_products
from hrl.models.head import _nothing_is_packed
from hrl.models.packed_model import TokenRows, pack_micro_batch
from hrl.protocol import DataProto
from hrl.workers.layout_probe import ADAPTER, LayoutRequest, compare_adapter
from tests.models.hybrids import HYBRIDS, save_hybrid
from tests.models.tiny import (
    VOCAB,
    actor_config,
    as_batch,
    critic_config,
    fsdp_config,
    model_config,
    run_ranks,
    world_of_one,
)
from tests.workers.asked import Actor, Critic, learn_answers, learn_pairs, learn_scores
from tests.workers.engine.ranks import CPU, full, gradients, parameters
from tests.workers.partition import as_pairs, local_gradients

pytestmark = pytest.mark.cluster

TEMPERATURE = 0.7
#: Prompts and answers in tokens. One row is longer than the 64 tokens that a delta net takes at once; one answer is
#: empty, and one has a single token.
PROMPTS, ANSWERS = (3, 3, 11, 11, 40, 40, 9, 9), (6, 0, 1, 12, 30, 5, 9, 7)
#: Tokens of a micro-batch, with padding: more than the longest row, and less than all.
BUDGET = 80
PLANNER = Planner(share_prefix=True, packs_rows=False)
#: transformers computes norms and states in float32 whatever the model's dtype.
CLOSE = {"rtol": 2e-5, "atol": 4e-6}
ON_TWO_RANKS = ("qwen3_next", "falcon_h1")


def ragged_batch() -> DataProto:
    """Rows in groups of two, with a tool's token inside some answers."""
    rng, count = np.random.default_rng(3), len(PROMPTS)
    p, r = max(PROMPTS), max(ANSWERS)
    prompts, responses = np.zeros((count, p), np.int64), np.zeros((count, r), np.int64)
    mask, trained = np.zeros((count, p + r), np.int64), np.zeros((count, r), np.int64)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        prompts[row, p - prompt :] = prompts[row - 1, p - prompt :] if row % 2 else rng.integers(3, VOCAB, prompt)
        responses[row, :answer] = rng.integers(3, VOCAB, answer)
        mask[row, p - prompt : p + answer] = 1
        trained[row, :answer] = 1
        if answer > 5:
            trained[row, 2] = 0
    return as_batch(rng, prompts, responses, mask, trained, 2, TEMPERATURE)


def plain(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """The model as transformers has it, in float64."""
    model = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **options).eval()
    use_grouped_products(model)
    return model


def row_of(batch: DataProto, row: int) -> Tensor:
    mask = batch.batch["attention_mask"][row].bool()
    return torch.cat([batch.batch["prompts"][row], batch.batch["responses"][row]])[mask][None]


def alone(model: PreTrainedModel, batch: DataProto) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies ``(B, R)`` of trained tokens, a forward for each row."""
    found = torch.zeros(2, *batch.batch["responses"].shape, dtype=torch.float64)
    for row in range(len(batch)):
        tokens = row_of(batch, row)
        columns = batch.batch["response_mask"][row].nonzero()[:, 0]
        if len(columns):
            at = tokens.shape[1] - int(batch.batch["attention_mask"][row, max(PROMPTS) :].sum()) + columns
            log_probs = (model(tokens).logits[0, at - 1].double() / TEMPERATURE).log_softmax(-1)
            found[0, row, columns] = log_probs.gather(1, tokens[0, at, None])[:, 0]
            found[1, row, columns] = -(log_probs.exp() * log_probs).sum(-1)
    return found[0], found[1]


def policy_of(folder: Path, **actor: Any) -> Actor:
    model = model_config(folder, packs_rows=False, enable_gradient_checkpointing=True)
    return Actor(model, actor_config(**actor), fsdp_config("float64"), device=CPU, total_steps=10)


def plan_update(batch: DataProto, ranks: int = 1, *, rows: int | None = None) -> BatchPlan:
    limits = MicroBatchLimits(BUDGET, rows, "a.key")
    return PLANNER.update(batch, ranks, limits, mini_batch_rows=len(batch), epochs=1)


def held(batch: DataProto, plan: BatchPlan, rank: int = 0) -> tuple[DataProto, RankPlan]:
    return batch.select_idxs(list(plan.rows[rank])), plan.ranks[rank]


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together, over the norm of those that are wanted."""
    assert found.keys() == wanted.keys()
    apart = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return (apart / sum(float(gradient.square().sum()) for gradient in wanted.values())) ** 0.5


@pytest.mark.parametrize("family", HYBRIDS)
def test_padded_rows_compute_what_each_row_computes_alone(family: str, tmp_path: Path) -> None:
    folder, batch = save_hybrid(tmp_path, family), ragged_batch()
    model, policy_options = plain(folder), {"entropy_coeff": 0.05, "use_kl_loss": True}
    with world_of_one():
        policy = policy_of(folder, **policy_options)
        mine, own = held(batch, PLANNER.forward(batch, 1, MicroBatchLimits(BUDGET, None, "a.key")))
        assert len(own.mini_batches[0].micro_batches) > 2
        found = policy.log_probs(mine, own, with_entropy=True).batch
        with torch.no_grad():
            log_probs, entropies = alone(model, mine)
        torch.testing.assert_close(found["old_log_probs"], log_probs.float(), **CLOSE)
        torch.testing.assert_close(found["entropys"], entropies.float(), **CLOSE)

        # Gradients of likelihood are those of the definition; those of PPO do not depend on the cut.
        mine, own = held(batch, plan_update(batch))
        of_answers = local_gradients(policy, partial(learn_answers, policy, loss_agg_mode="token-mean"), mine, own)
        (-alone(model, mine)[0].sum() / mine.batch["response_mask"].sum()).backward()
        wanted = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert distance({name: of_answers[name] for name in wanted}, wanted) < 1e-6
        cuts = [gradients(policy, *held(batch, plan_update(batch, rows=rows))) for rows in (None, 1)]
        assert distance(*cuts) < 1e-6


def test_values_scores_and_pairs_are_those_of_rows_alone(tmp_path: Path) -> None:
    folder, batch = save_hybrid(tmp_path, "qwen3_5_text"), ragged_batch()
    with world_of_one():
        model = model_config(folder, packs_rows=False)
        critic = Critic(model, critic_config(), fsdp_config("float64"), device=CPU, total_steps=10)
        torch.nn.init.normal_(critic.engine.module.model.score.weight, generator=torch.Generator().manual_seed(1))
        reference = plain(folder, AutoModelForSequenceClassification, num_labels=1, pad_token_id=-1)
        reference.score.weight.data.copy_(full(critic.engine.module.model.score.weight))
        mine, own = held(batch, PLANNER.forward(batch, 1, MicroBatchLimits(BUDGET, None, "a.key")))
        values, scores = critic.values(mine, own).batch["values"], critic.scores(mine, own).batch["rm_scores"]
        last = mine.batch["attention_mask"][:, max(PROMPTS) :].sum(1) - 1
        for row in range(len(mine)):
            tokens = row_of(mine, row)
            with torch.no_grad():
                hidden = reference.model(tokens).last_hidden_state[0].float()
            of_row = hidden @ reference.score.weight[0].float()
            columns = mine.batch["response_mask"][row].nonzero()[:, 0]
            start = tokens.shape[1] - int(last[row]) - 2
            torch.testing.assert_close(values[row, columns], of_row[start + columns].detach(), **CLOSE)
            score = scores[row].sum() if scores.dim() > 1 else scores[row]
            torch.testing.assert_close(score, of_row[-1].detach(), **CLOSE)

        pairs = as_pairs(batch.select_idxs([2, 3, 4, 5, 6, 7]))
        policy = policy_of(folder)
        plans = [
            PLANNER.pairs(pairs, 1, MicroBatchLimits(budget, rows, "a.key"), mini_batch_pairs=3)
            for budget, rows in ((2 * BUDGET, None), (None, 1))
        ]
        dpo, reward = partial(learn_pairs, policy, options=PairOptions(0.4)), partial(learn_scores, critic)
        for learner, learn in ((policy, dpo), (critic, reward)):
            found = [local_gradients(learner, learn, *held(pairs, plan)) for plan in plans]
            assert distance(*found) < 1e-6


def on_two_ranks(rank: int, folders: list[str]) -> dict[str, dict[str, Tensor]]:
    """Gradients of PPO, and weights and what the experts did after a step, of each family."""
    found = {}
    for folder in folders:
        batch, ranks = ragged_batch(), dist.get_world_size()
        policy, (mine, own) = policy_of(Path(folder), entropy_coeff=0.05), held(batch, plan_update(batch, ranks), rank)
        found[folder] = gradients(policy, mine, own)
        policy.learn(mine, own)
        found[folder] |= {f"{name} after": weight for name, weight in parameters(policy).items()}
        found[folder] |= {f"sent {name}": full(p) for name, p in policy.engine.iter_full_params(torch.float64)}
    return found


def test_two_ranks_are_one(tmp_path: Path) -> None:
    folders = [str(save_hybrid(tmp_path / family, family)) for family in ON_TWO_RANKS]
    with world_of_one():
        wanted = on_two_ranks(0, folders)
    for found in run_ranks(2, tmp_path / "ranks", on_two_ranks, folders):
        for folder in folders:
            assert distance(found[folder], wanted[folder]) < 1e-6


def _balanced(policy: Actor, told: dict[str, Any], batch: DataProto, plan: RankPlan) -> None:
    """Imitate with a loss of the load of experts, and say what the experts did."""
    metrics = learn_answers(policy, batch, plan, router_aux_loss_coef=0.1)
    told |= {name: metric.result() for name, metric in metrics.items() if name.startswith("moe/")}


def test_experts_and_their_load_do_not_count_padding(tmp_path: Path) -> None:
    folder, batch = save_hybrid(tmp_path, "qwen3_next"), ragged_batch()
    with world_of_one():
        policy = policy_of(folder)
        measured = []
        for rows in (None, 1):
            plan = plan_update(batch, rows=rows)
            mine, own = held(batch, plan)
            told: dict[str, Any] = {}
            found = local_gradients(policy, partial(_balanced, policy, told), mine, own)
            assert told["moe/aux_loss"] > 0
            chosen = policy.log_probs(mine, own, records_experts=True).non_tensor_batch["routed_experts"]
            place = {row: at for at, row in enumerate(plan.rows[0])}
            measured.append((found, told, [chosen[place[row]].tolist() for row in range(len(batch))]))
        (found, told, experts), (wanted, expected, experts_alone) = measured
        assert experts == experts_alone
        assert distance(found, wanted) < 1e-6
        assert told == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("family", "is_right"), [("falcon_h1", True), ("mamba", False)])
def test_an_adapter_is_compared_on_padded_rows(family: str, is_right: bool, tmp_path: Path) -> None:
    """Mamba multiplies by the weight of a linear layer without calling it, so that nothing is added there."""
    request = LayoutRequest(str(save_hybrid(tmp_path, family)), {}, False, 128, False, (), packs_rows=False)
    assert compare_adapter(request, ADAPTER).is_right == is_right


def test_padded_rows_lie_below_each_other_and_know_where_each_token_is() -> None:
    rows = TokenRows.of(ragged_batch())
    packed = pack_micro_batch(rows, (0, 1, 7), share_prefix=True, packs_rows=False, wanted="next", device=CPU)
    # Row 0 reads 3 + 5 tokens, row 1 has no answer, row 7 reads 9 + 6.
    assert packed.input_ids.shape == (2, 15) and packed.layout.num_tokens == 30
    assert packed.input_ids[0, :8].tolist() == [*rows.prompts[0], *rows.responses[0, :5]]
    assert (packed.input_ids[0, 8:] == 0).all()
    trained = np.flatnonzero(rows.trained[0])
    assert packed.hidden_index.tolist() == [*(2 + trained), *(15 + 8 + np.flatnonzero(rows.trained[7]))]
    assert packed.layout.num_pairs == 2 * 15 * 16 // 2
    with pytest.raises(ValueError, match="padded rows are run by one rank"):
        pack_micro_batch(rows, (0,), share_prefix=False, packs_rows=False, wanted="next", device=CPU, group=object())


def test_a_thread_that_runs_padded_rows_changes_nothing_for_others() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    look = partial(masking_utils.find_packed_sequence_indices, positions)
    with _nothing_is_packed(), ThreadPoolExecutor(1) as other:
        assert look() is None
        assert other.submit(look).result().tolist() == [[0, 0, 1, 1, 1]]
    assert look().tolist() == [[0, 0, 1, 1, 1]]
