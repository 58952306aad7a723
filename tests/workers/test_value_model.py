"""Values and scores against plain forwards; the critic's update."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.value_loss import VALUE_LOSSES, value_loss
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.models.packed_model import TokenRows
from hrl.models.source import ModelSourceError
from tests.models.tiny import (
    RESPONSE_WIDTH,
    SHAPE,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
    save_llama,
    trim,
)
from tests.models.trees import tree_batch
from tests.workers.asked import Critic
from tests.workers.engine.ranks import CPU, gradients, parameters

pytestmark = pytest.mark.usefixtures("world")

NORM_ERROR = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(5)
    LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)).save_pretrained(folder)
    return folder


def critic_of(path, **changes) -> Critic:
    return Critic(model_config(path), critic_config(**changes), fsdp_config(), device=CPU, total_steps=10)


def plain_head_outputs(path, batch, *, grad: bool = False):
    """``(B, R)`` values before each trained token, and ``(B,)`` scores at the last token, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    values, scores = torch.zeros(len(batch), RESPONSE_WIDTH, dtype=torch.float64), []
    with torch.set_grad_enabled(grad):
        for row in range(len(batch)):
            tokens, prompt_length, columns = trim(batch, row)
            outputs = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
            for column in columns.tolist():
                values[row, column] = outputs[prompt_length + column - 1]
            scores.append(outputs[-1])
    return model, values, torch.stack(scores)


def test_values_stand_before_each_token_and_scores_at_the_last(classifier):
    batch = make_batch()
    model = Critic(model_config(classifier), None, fsdp_config(), device=CPU, total_steps=None)
    plan = plan_rows(batch, 1, 3).ranks[0]
    _, values, scores = plain_head_outputs(classifier, batch)
    torch.testing.assert_close(model.values(batch, plan).batch["values"], values.float(), **NORM_ERROR)
    torch.testing.assert_close(model.scores(batch, plan).batch["rm_scores"], scores.float(), **NORM_ERROR)


@pytest.mark.parametrize("head", ["regression_head", "v_head.summary", "mlp"])
def test_heads_of_other_code_score_as_that_code_does(tmp_path, head):
    """By hand: backbone, then the head's own tensors at the last token."""
    torch.manual_seed(7)
    model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0))
    model.config.architectures = ["Qwen2ForRewardModel"]
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    width = SHAPE["hidden_size"]
    if head == "mlp":
        own = {"score.0.weight": (width, width), "score.0.bias": (width,), "score.2.weight": (1, width)}
    else:
        own = {f"{head}.weight": (1, width), **({f"{head}.bias": (1,)} if "." in head else {})}
    own = {name: torch.randn(shape) for name, shape in own.items()}
    model.config.save_pretrained(tmp_path)
    save_file(weights if head == "v_head.summary" else weights | own, tmp_path / "model.safetensors")
    if head == "v_head.summary":  # LLaMA-Factory's has a file of its own
        save_file(own, tmp_path / "value_head.safetensors")
    batch, scores = make_batch(), []
    for row in range(len(batch)):
        hidden = model.model(trim(batch, row)[0]).last_hidden_state[0, -1]
        if head == "mlp":
            scores.append(own["score.2.weight"] @ (own["score.0.weight"] @ hidden + own["score.0.bias"]).relu())
        else:
            scores.append(own[f"{head}.weight"] @ hidden + own.get(f"{head}.bias", 0.0))
    frozen = Critic(model_config(tmp_path), None, fsdp_config(), device=CPU, total_steps=None)
    torch.testing.assert_close(frozen.scores(batch).batch["rm_scores"], torch.cat(scores).detach(), **NORM_ERROR)
    if head == "regression_head":
        critic_of(tmp_path)
    else:
        with pytest.raises(ModelSourceError, match="it scores as it is, and a model that learns has one linear layer"):
            critic_of(tmp_path)


def test_values_and_scores_of_a_tree_are_those_of_its_rows_alone(classifier):
    batch = tree_batch(seed=4, num_rows=12, longest=20)
    plan = Planner(share_prefix=True).forward(batch, 1, MicroBatchLimits(40, None, ""))
    mine = batch.select_idxs(list(plan.rows[0]))
    together, alone = (
        Critic(model_config(classifier, share_prefix=shared), None, fsdp_config(), device=CPU, total_steps=None)
        for shared in (True, False)
    )
    for name in ("values", "scores"):
        got, want = (getattr(each, name)(mine, plan.ranks[0]).batch for each in (together, alone))
        for column in want.keys():
            assert want[column].any()
            torch.testing.assert_close(got[column], want[column], **NORM_ERROR)


def test_gradients_equal_those_of_plain_forwards(classifier):
    batch = make_batch()
    mask = batch.batch["response_mask"].bool()
    model, values, _ = plain_head_outputs(classifier, batch, grad=True)
    loss_mat, _ = value_loss(values, batch.batch["values"], batch.batch["returns"], mask, 0.5)
    aggregate(loss_mat, mask, "seq-mean-token-sum", Counts.of(mask)).backward()
    got = gradients(critic_of(classifier, loss_agg_mode="seq-mean-token-sum"), batch, plan_rows(batch, 1, 2).ranks[0])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[f"model.{name}"], parameter.grad, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(("cliprange", "named"), [(None, "squared"), (0.5, "squared"), (0.5, "absolute")])
def test_the_loss_is_the_named_one_or_follows_the_clip_range(classifier, monkeypatch, cliprange, named):
    monkeypatch.setitem(
        VALUE_LOSSES, "absolute", lambda new, old, to, clip: ((new - to).abs(), (new - old).abs() > clip)
    )
    batch = make_batch()
    asked = {"loss_name": None if cliprange is None else named}
    _, values, _ = plain_head_outputs(classifier, batch)
    error = (values - batch.batch["returns"])[batch.batch["response_mask"].bool()]
    by_hand = {"squared": 0.5 * error.square(), "absolute": error.abs()}[named].mean()
    metrics = critic_of(classifier, cliprange_value=cliprange).learn(batch, plan_rows(batch, 1, 2).ranks[0], **asked)
    assert metrics["critic/vf_loss"].result() == pytest.approx(float(by_hand), rel=1e-4)


def test_a_critic_from_a_causal_model_starts_at_zero_and_learns(tmp_path):
    critic = critic_of(save_llama(tmp_path / "llama"))
    batch = make_batch()
    assert not critic.values(batch).batch["values"].any()
    batch.batch["values"] = torch.zeros(len(batch), RESPONSE_WIDTH)
    batch.batch["returns"] = torch.full((len(batch), RESPONSE_WIDTH), 0.4)
    losses = [critic.learn(batch, plan_rows(batch, 1, 2).ranks[0])["critic/vf_loss"].result() for _ in range(12)]
    assert losses[0] == pytest.approx(0.5 * 0.4**2, rel=1e-6)
    assert losses[-1] < 0.5 * losses[0]


def test_prompts_are_packed_as_the_configuration_says(classifier):
    batch, tokens = make_batch(), {}
    _, values, _ = plain_head_outputs(classifier, batch)
    for shared in (True, False):
        config = model_config(classifier, share_prefix=shared)
        model = Critic(config, None, fsdp_config(), device=CPU, total_steps=None)
        tokens[shared] = model.engine.pack(TokenRows.of(batch), tuple(range(len(batch)))).input_ids.numel()
        torch.testing.assert_close(model.values(batch).batch["values"], values.float(), **NORM_ERROR)
    assert tokens[True] < tokens[False]


def test_metrics_carry_verls_names(classifier):
    batch = make_batch()
    metrics = critic_of(classifier).learn(batch, plan_rows(batch, 1, 2).ranks[0])
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"} <= set(
        metrics
    )
    assert metrics["critic/vpred_mean"].count == int(batch.batch["response_mask"].sum())


def test_a_critic_is_saved_loaded_and_exported(classifier, tmp_path):
    critic, batch = critic_of(classifier), make_batch()
    critic.learn(batch, plan_rows(batch, 1, 1).ranks[0])
    critic.engine.save(tmp_path / "state")
    critic.engine.export_hf(tmp_path / "hf")
    resumed = critic_of(classifier)
    resumed.engine.load(tmp_path / "state")
    for name, value in parameters(critic).items():
        assert torch.equal(parameters(resumed)[name], value)
    scores = Critic(model_config(tmp_path / "hf"), None, fsdp_config(), device=CPU, total_steps=None)
    want = critic.scores(batch).batch["rm_scores"]
    torch.testing.assert_close(scores.scores(batch).batch["rm_scores"], want, rtol=1e-4, atol=1e-5)
