"""Mixtures of experts: choices are recorded and replayed, loads are balanced and counted, however rows are cut.

What is compared with is transformers' own forward of each row alone, whose routers are told what to choose, and
transformers' own loss of the load of experts. Both take softmaxes in float32, in a model of float64 too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hrl.batching.plan import BatchPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.columns import object_column
from hrl.metrics import Metric, StepMetrics
from hrl.models.experts import RoutingError
from hrl.models.loading import load_causal_lm
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS, missing, routing_dtype
from hrl.workers.engine.load_balance import LoadBalance, LoadCounter
from hrl.workers.engine.optim import StepReport
from hrl.workers.engine.router_meter import RouterMeter
from tests.models.tiny import (
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
    run_ranks,
    save_llama,
    save_mixture,
    world_of_one,
)
from tests.models.trees import tree_batch
from tests.workers.asked import Actor, learn_answers
from tests.workers.engine.ranks import CPU, full

LAYERS, EXPERTS, EACH = 2, 4, 2
FAMILIES = ("mixtral", "qwen3_moe")
COEFFICIENT = 0.5
#: Of two ranks: each has rows of its own, or slices of the same, or parts of each weight, or half of the experts.
LAYOUTS = {
    "rows": {},
    "slices": {"ulysses_sequence_parallel_size": 2},
    "weights": {"tensor_parallel_size": 2},
    "experts": {"expert_parallel_size": 2},
}
NONE = missing(routing_dtype(EXPERTS))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp(request.param), request.param)


def actor_of(path: Path, **layout: int) -> Actor:
    """Whose layers run again in the backward pass."""
    model, fsdp = model_config(path, enable_gradient_checkpointing=True), fsdp_config("float64", **layout)
    return Actor(model, actor_config(), fsdp, device=CPU, total_steps=10)


# ------------------------------------------------------------------------------------------- by the definition


def tokens_of(batch: DataProto, row: int) -> tuple[np.ndarray, int, np.ndarray]:
    """A row's tokens without padding, its prompt's length, and its trained columns."""
    prompts, responses, mask = (batch.batch[name][row].numpy() for name in ("prompts", "responses", "attention_mask"))
    tokens = np.concatenate([prompts, responses])[mask.astype(bool)]
    return tokens, int(mask[: len(prompts)].sum()), np.flatnonzero(batch.batch["response_mask"][row].numpy())


def random_choices(batch: DataProto, seed: int = 0) -> np.ndarray:
    """Any experts for each token but a row's last, the same where rows begin alike."""
    rng, of_beginning = np.random.default_rng(seed), dict[bytes, np.ndarray]()
    rows = []
    for row in range(len(batch)):
        tokens, _, _ = tokens_of(batch, row)
        choices = np.zeros((len(tokens) - 1, LAYERS, EACH), np.uint8)
        for at in range(len(choices)):
            fresh = np.stack([rng.permutation(EXPERTS)[:EACH] for _ in range(LAYERS)]).astype(np.uint8)
            choices[at] = of_beginning.setdefault(tokens[: at + 1].tobytes(), fresh)
        rows.append(choices)
    return object_column(rows)


class Defined(NamedTuple):
    """What a plain forward of each row alone gives.

    Attributes:
        log_probs: ``(B, R)``.
        experts: By row that is trained, ``(tokens, L, K)``.
        losses: The mean negative log-likelihood, and the loss of the load of experts.
        gradients: Of the first and ``COEFFICIENT`` times the second.
    """

    log_probs: Tensor
    experts: dict[int, np.ndarray]
    losses: tuple[Tensor, Tensor]
    gradients: dict[str, Tensor]


def by_the_definition(path: Path, batch: DataProto, choices: np.ndarray | None) -> Defined:
    """Routers choose what they are told, the softmax of whose logits, made to sum to one, weighs the experts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    told, logits_of, chosen = list[Tensor](), list[Tensor](), list[Tensor]()

    def choose(router: Any, _: Any, output: Any) -> Any:
        logits = output[0].reshape(-1, EXPERTS)
        own = logits.topk(EACH, -1)[1]
        experts = own
        if told:
            given = told.pop(0)
            experts = torch.where(given == NONE, own, given)
        weights = logits.softmax(-1).gather(-1, experts)
        logits_of.append(logits)
        chosen.append(experts)
        return output[0], weights / weights.sum(-1, keepdim=True), experts

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(choose)
    temperature, experts = batch.meta_info["temperature"], dict[int, np.ndarray]()
    out = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.float64)
    for row in range(len(batch)):
        tokens, prompt_length, columns = tokens_of(batch, row)
        if not len(columns):
            continue
        used = prompt_length + columns[-1]
        if choices is not None:
            told[:] = torch.from_numpy(choices[row][:used].astype(np.int64)).unbind(1)
        before = len(chosen)
        log_probs = (model(torch.from_numpy(tokens[None, :used])).logits[0] / temperature).log_softmax(-1)
        experts[row] = torch.stack(chosen[before:], 1).numpy()
        for column in columns.tolist():
            out[row, column] = log_probs[prompt_length + column - 1, tokens[prompt_length + column]]
    nll = -out.sum() / batch.batch["response_mask"].sum()
    if choices is None:
        layers = tuple(torch.cat(logits_of[layer::LAYERS]) for layer in range(LAYERS))
        balance = load_balancing_loss_func(tuple(layer.double() for layer in layers), EXPERTS, EACH)
    else:  # the same, of what was replayed
        every = torch.cat([torch.from_numpy(rows).flatten(0, 1) for rows in experts.values()])
        load = torch.bincount(every.flatten(), minlength=EXPERTS) / len(every)
        balance = EXPERTS * (load * torch.cat(logits_of).softmax(-1).mean(0)).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(nll + COEFFICIENT * balance, parameters)
    return Defined(out.detach(), experts, (nll.detach(), balance.detach()), dict(zip(names, gradients, strict=True)))


# ------------------------------------------------------------------------------------------- by the engine


def by_the_engine(
    path: Path, plan: BatchPlan, batch: DataProto, layout: dict[str, int], **asked: Any
) -> dict[str, Any]:
    """Gradients and metrics of imitation with the loss of the load, as they are before clipping."""
    part = dist.get_rank() // plan.ranks_each
    actor = actor_of(path, **layout)
    optimizer, gradients, losses = actor.engine.optimizer, {}, list[Tensor]()

    def look(loss: Tensor, *, fill_missing: bool = False) -> StepReport:
        losses.append(loss)
        gradients.update({name.removeprefix("model."): full(p.grad) for p, name in optimizer.names.items()})
        optimizer.zero_grad()
        return StepReport(0.0, 0.0, applied=True)

    optimizer.step = look
    mine = batch.select_idxs(list(plan.rows[part]))
    metrics = learn_answers(actor, mine, plan.ranks[part], router_aux_loss_coef=COEFFICIENT, **asked)
    found = actor.log_probs(mine, records_experts=True, **asked)
    return {
        "gradients": gradients,
        "loss": losses[0],
        "metrics": {name: [m.kind, m.value, m.count] for name, m in metrics.items() if name.startswith("moe/")},
        "experts": [torch.from_numpy(row) for row in found.non_tensor_batch[ROUTED_EXPERTS]],
        "rows": list(plan.rows[part]),
    }


def in_both_ways(
    path: Path, plan: BatchPlan, batch: DataProto, layout: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """By the routers' own choice, and by the one to be replayed."""
    asked: tuple[dict[str, Any], ...] = ({}, {"replays_experts": True})
    return [by_the_engine(path, plan, batch, layout or {}, **each) for each in asked]


def together(layout: dict[str, int]) -> int:
    """Ranks that run the same rows."""
    return math.prod(size for name, size in layout.items() if name != "expert_parallel_size")


def on_ranks(rank: int, path: Path) -> dict[str, list[dict[str, Any]]]:
    batch, ranks = batch_with_choices(), dist.get_world_size()
    return {
        name: in_both_ways(path, plan_of(batch, ranks, together(layout)), batch, layout)
        for name, layout in LAYOUTS.items()
    }


def batch_with_choices() -> DataProto:
    batch = make_batch()
    batch.non_tensor_batch[ROUTED_EXPERTS] = random_choices(batch)
    return batch


def plan_of(batch: DataProto, ranks: int, degree: int) -> BatchPlan:
    """Three micro-batches for each rank, or group of them, and one of no rows."""
    plan = plan_rows(batch, ranks // degree, 3, empty=True)
    return BatchPlan(plan.rows, plan.ranks, degree)


def check(ranks: list[dict[str, Any]], degree: int, want: Defined, *, replays: bool) -> None:
    for found in ranks:
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-7, rtol=1e-6, msg=name)
        for row, experts in zip(found["rows"], found["experts"], strict=True):
            assert np.array_equal(experts.numpy(), want.experts.get(row, experts[:0].numpy()))
    # Each group's share of the loss is whole on all its ranks.
    whole = sum(float(found["loss"]) for found in ranks[::degree])
    assert whole == pytest.approx(float(want.losses[0] + COEFFICIENT * want.losses[1]), abs=1e-6)
    assert all(found["loss"] == ranks[index // degree * degree]["loss"] for index, found in enumerate(ranks))
    metrics = StepMetrics()
    for found in ranks[::degree]:
        metrics.observe({name: Metric(*parts) for name, parts in found["metrics"].items()})
    assert metrics["moe/aux_loss"] == pytest.approx(float(want.losses[1]), abs=1e-6)
    loads = [np.concatenate([rows[:, layer].ravel() for rows in want.experts.values()]) for layer in range(LAYERS)]
    shares = [np.bincount(load, minlength=EXPERTS) / len(load) for load in loads]
    for layer, share in enumerate(shares):
        assert metrics[f"moe/layer_{layer}/max_expert_share"] == pytest.approx(share.max())
    assert metrics["moe/max_expert_share"] == pytest.approx(max(share.max() for share in shares))
    assert metrics["moe/max_vio"] == pytest.approx(np.mean([share.max() * EXPERTS - 1 for share in shares]))
    assert metrics["moe/dead_experts"] == sum((share == 0).sum() for share in shares)
    assert 0 < metrics["moe/router_entropy"] < np.log(EXPERTS)
    assert ("moe/router_agreement" in metrics) is replays
    if replays:
        assert metrics["moe/replayed"] == 1
        assert 0.2 < metrics["moe/router_agreement"] < 0.8


def test_gradients_choices_and_loads_are_those_of_each_row_alone_for_any_cut(folder):
    batch = batch_with_choices()
    choices = batch.non_tensor_batch[ROUTED_EXPERTS]
    wants = [by_the_definition(folder, batch, None), by_the_definition(folder, batch, choices)]
    assert (wants[0].log_probs - wants[1].log_probs).abs().max() > 0.1
    with world_of_one():
        for plan in (plan_rows(batch, 1, 1), plan_of(batch, 1, 1)):
            for replays, (want, found) in enumerate(zip(wants, in_both_ways(folder, plan, batch), strict=True)):
                check([found], 1, want, replays=bool(replays))


@pytest.mark.cluster
def test_two_ranks_have_gradients_choices_and_loads_of_one_in_every_layout(tmp_path):
    path = save_mixture(tmp_path / "model", "qwen3_moe")
    batch = batch_with_choices()
    ranks = run_ranks(2, tmp_path / "ranks", on_ranks, path)
    choices = batch.non_tensor_batch[ROUTED_EXPERTS]
    wants = [by_the_definition(path, batch, None), by_the_definition(path, batch, choices)]
    for name, layout in LAYOUTS.items():
        for replays, want in enumerate(wants):
            check([found[name][replays] for found in ranks], together(layout), want, replays=bool(replays))


def known_by_any(batch: DataProto) -> np.ndarray:
    """The choices of each row, where it has none those of the rows that run and begin alike."""
    known = dict[bytes, np.ndarray]()
    for row, choices in enumerate(batch.non_tensor_batch[ROUTED_EXPERTS]):
        tokens, prompt_length, columns = tokens_of(batch, row)
        for at in range(prompt_length + columns[-1] if len(columns) else 0):
            if choices[at, 0, 0] != NONE:
                known[tokens[: at + 1].tobytes()] = choices[at]
    rows = [choices.copy() for choices in batch.non_tensor_batch[ROUTED_EXPERTS]]
    for row, choices in enumerate(rows):
        tokens = tokens_of(batch, row)[0]
        for at in range(len(choices)):
            choices[at] = known.get(tokens[: at + 1].tobytes(), choices[at])
    return object_column(rows)


@pytest.mark.parametrize("make", [make_batch, lambda: tree_batch(3, 9)], ids=["prompts", "trees"])
def test_tokens_without_a_known_choice_make_their_own(folder, make):
    batch = make()
    choices = random_choices(batch)
    for row, known in enumerate(choices):  # as if each prompt but its last token had been in the engine's cache
        known[: tokens_of(batch, row)[1] - 1] = NONE
    batch.non_tensor_batch[ROUTED_EXPERTS] = choices
    with world_of_one():
        actor = actor_of(folder)
        plan = Planner(share_prefix=True).forward(batch, 1, MicroBatchLimits(1000, None, ""))
        mine = batch.select_idxs(list(plan.rows[0]))
        found = actor.log_probs(mine, plan.ranks[0], replays_experts=True).batch["old_log_probs"]
        nothing = mine.select()
        nothing.non_tensor_batch[ROUTED_EXPERTS] = object_column(
            [np.full_like(known, NONE) for known in mine.non_tensor_batch[ROUTED_EXPERTS]]
        )
        of_nothing = actor.log_probs(nothing, plan.ranks[0], replays_experts=True).batch["old_log_probs"]
        alone = actor.log_probs(mine, plan.ranks[0]).batch["old_log_probs"]
    want = by_the_definition(folder, mine, known_by_any(mine))
    torch.testing.assert_close(found.double(), want.log_probs, atol=1e-6, rtol=0)
    assert torch.equal(of_nothing, alone)


def test_a_model_without_experts_is_refused_by_the_key(tmp_path):
    batch = batch_with_choices()
    with world_of_one():
        actor = actor_of(save_llama(tmp_path))
        plan = plan_rows(batch, 1, 1).ranks[0]
        with pytest.raises(RoutingError, match=r"actor\.router_replay\.mode=disabled"):
            actor.log_probs(batch, replays_experts=True)
        with pytest.raises(RoutingError, match="router_aux_loss_coef is set, and this model has no experts"):
            learn_answers(actor, batch, plan, router_aux_loss_coef=0.1)


def test_choices_of_another_model_are_refused(tmp_path):
    batch = make_batch()
    batch.non_tensor_batch[ROUTED_EXPERTS] = object_column([rows[:, :, :1] for rows in random_choices(batch)])
    with world_of_one():
        actor = actor_of(save_mixture(tmp_path, "mixtral"))
        with pytest.raises(RoutingError, match="another number of experts for each token"):
            actor.log_probs(batch, replays_experts=True)
        batch.non_tensor_batch[ROUTED_EXPERTS][3] = np.zeros((99, LAYERS, EACH), np.uint8)
        with pytest.raises(ValueError, match="row 3 .*experts for more tokens"):
            actor.log_probs(batch, replays_experts=True)


def test_the_host_reads_nothing_of_what_routers_choose(folder):
    """Meta tensors have nothing to read: so no pass waits for a GPU, and no loop in Python goes over experts."""
    batch, device = batch_with_choices(), torch.device("meta")
    model = load_causal_lm(model_config(folder, enable_gradient_checkpointing=True), torch.bfloat16).model
    module = PackedCausalLM(model.to(device))
    rows = TokenRows.of(batch, routed=True)
    meter, counter = RouterMeter(module.experts, device), LoadCounter(EXPERTS, device)
    for known in (rows, replace(rows, routed=None)):
        packed = pack_micro_batch(
            known, (0, 2, 3, 4), share_prefix=True, wanted="next", device=device, with_routing=True
        )
        with module.experts.following(packed.routing) as routing:
            log_probs = module(packed, 0.7, False).log_prob
            counter.add(routing.stacked(module.experts.dtype), packed.routing.num_rows)
            meter.add(routing, packed.routing.num_rows)
            share = LoadBalance(torch.ones(EXPERTS, device=device), torch.ones((), device=device), 0.1, None).share(
                routing, packed.routing.num_rows
            )
            (log_probs.sum() + share).backward()
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("gate.weight")]
    assert len(gates) == LAYERS and all(gate.grad is not None for gate in gates)


@pytest.mark.gpu
def test_a_gpu_in_bfloat16_replays_and_is_as_near_to_float64_as_a_cpu(folder):
    batch = batch_with_choices()
    rows, want = (
        TokenRows.of(batch, routed=True),
        by_the_definition(folder, batch, batch.non_tensor_batch[ROUTED_EXPERTS]),
    )
    module = PackedCausalLM(load_causal_lm(model_config(folder), torch.bfloat16).model)
    apart = []
    for device in ("cpu", "cuda"):
        packed = pack_micro_batch(
            rows,
            tuple(range(len(batch))),
            share_prefix=True,
            wanted="next",
            device=torch.device(device),
            with_routing=True,
        )
        with torch.no_grad(), module.to(device).experts.following(packed.routing) as routing:
            found = packed.unpack(module(packed, 1.0, False).log_prob).cpu()
        assert torch.equal(routing.stacked(module.experts.dtype).cpu(), packed.routing.replayed.cpu())
        apart.append((found - want.log_probs[:, : found.shape[1]])[packed.mask.cpu()].abs().mean())
    assert apart[1] <= 2 * apart[0] + 1e-3
