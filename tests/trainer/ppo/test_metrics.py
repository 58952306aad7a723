import numpy as np
import pytest
import torch

from hrl.protocol import DataProto
from hrl.trainer.ppo import metrics as m


def make_batch(**overrides):
    """Three rows, P=3, R=4: prompt lengths 2, 3, 1; response lengths 2, 4, 0; row 1 has a tool token."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]])
    response_mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    columns = {
        "attention_mask": attention,
        "responses": torch.zeros(3, 4, dtype=torch.int64),
        "response_mask": response_mask,
        "token_level_scores": torch.tensor([[0.0, 1.0, 0, 0], [0, 0, 0, 3.0], [0, 0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0.0, 0.5, 0, 0], [0, 0, 0, 2.5], [0, 0, 0, 0]]),
        # 99 stands where nothing may look.
        "advantages": torch.tensor([[1.0, 2.0, 99, 99], [3.0, 99, 4.0, 5.0], [99.0, 99, 99, 99]]),
        "returns": torch.tensor([[1.0, 2.0, 99, 99], [3.0, 99, 4.0, 5.0], [99.0, 99, 99, 99]]),
        "values": torch.tensor([[1.0, 2.0, 99, 99], [3.0, 99, 4.0, 5.0], [99.0, 99, 99, 99]]),
    } | overrides.pop("columns", {})
    non_tensors = {
        "uid": np.array(["a", "b", "b"], dtype=object),
        "finish_reason": np.array(["stop", "stop", "abort"], dtype=object),
    } | overrides
    return DataProto.from_dict(tensors=columns, non_tensors=non_tensors)


def test_lengths_come_from_the_attention_mask_and_clipping_from_the_sampler():
    out = m.compute_data_metrics(make_batch())
    assert (out["prompt_length/mean"], out["prompt_length/max"], out["prompt_length/min"]) == (2.0, 3.0, 1.0)
    assert (out["response_length/mean"], out["response_length/max"], out["response_length/min"]) == (2.0, 4.0, 0.0)
    assert out["response_length/clip_ratio"] == 0.0  # row 1 fills its columns, but ended by itself
    assert out["response/aborted_ratio"] == pytest.approx(1 / 3)
    cut = make_batch(finish_reason=np.array(["stop", "length", "abort"], dtype=object))
    assert m.compute_data_metrics(cut)["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_empty_responses_are_outside_of_score_and_reward_statistics():
    out = m.compute_data_metrics(make_batch())
    assert (out["critic/score/mean"], out["critic/score/max"], out["critic/score/min"]) == (2.0, 3.0, 1.0)
    assert (out["reward/mean"], out["reward/std"]) == (2.0, 1.0)
    assert out["critic/rewards/mean"] == 1.5


def test_responses_that_the_reward_function_left_out_are_in_no_score_statistics():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])  # row 1 has an answer, and no score
    out = m.compute_data_metrics(make_batch(columns={"response_mask": mask}))
    assert (out["reward/mean"], out["reward/std"], out["critic/score/max"], out["critic/rewards/max"]) == (1, 0, 1, 0.5)
    assert out["response/aborted_ratio"] == pytest.approx(1 / 3)
    one_group = make_batch(columns={"response_mask": mask}, uid=np.array(["a", "a", "b"], dtype=object))
    assert m.compute_data_metrics(one_group)["rollout/zero_variance_groups"] == 2


def test_the_score_is_the_functions_own_and_what_shaping_made_of_it_is_apart():
    # Sums of what is trained on are 1, 3 and 0 (empty); the functions gave 1, 1 and 9.
    shaped = make_batch(columns={"plain_scores": torch.tensor([1.0, 1.0, 9.0])})
    out = m.compute_data_metrics(shaped)
    assert (out["reward/mean"], out["reward/std"], out["critic/score/max"]) == (1.0, 0.0, 1.0)
    assert (out["reward/shaped_mean"], out["reward/shaped_std"]) == (2.0, 1.0)
    one_prompt = make_batch(columns={"plain_scores": torch.ones(3)}, uid=np.array(["a", "a", "b"], dtype=object))
    assert m.compute_data_metrics(one_prompt)["rollout/zero_variance_groups"] == 1, "estimators see 1 and 3 in a"
    plain = make_batch(columns={"plain_scores": torch.tensor([1.0, 3.0, 9.0])})
    assert m.compute_data_metrics(plain) == m.compute_data_metrics(make_batch()), "nothing changed a score that counts"


def test_left_out_validation_samples_are_counted_by_source():
    batch = DataProto.from_dict(non_tensors={"data_source": np.array(["a", "b", "b", "c"], dtype=object)})
    assert m.count_left_out(batch, torch.tensor([True, False, False, True])) == {"val/b/skipped": 2.0}


def test_masked_tokens_are_not_there():
    out = m.compute_data_metrics(make_batch())
    assert (out["critic/advantages/mean"], out["critic/advantages/max"]) == (3.0, 5.0)
    assert out["critic/values/max"] == 5.0
    assert out["critic/vf_explained_var"] == 1.0  # values equal returns wherever a token is trained


def test_explained_variance_is_zero_for_a_constant_critic():
    values = torch.full((3, 4), 3.0)
    assert m.compute_data_metrics(make_batch(columns={"values": values}))["critic/vf_explained_var"] == pytest.approx(
        0.0
    )


def test_a_group_without_spread_is_counted_once_and_empty_rows_do_not_give_it_spread():
    assert m.compute_data_metrics(make_batch())["rollout/zero_variance_groups"] == 2
    both = make_batch(uid=np.array(["a", "a", "a"], dtype=object))
    assert m.compute_data_metrics(both)["rollout/zero_variance_groups"] == 0


def test_without_critic_no_value_is_needed():
    batch = make_batch()
    batch.pop(batch_keys=["values"])
    assert not any("values" in name or "vf_" in name for name in m.compute_data_metrics(batch, use_critic=False))


def test_a_batch_of_empty_responses_gives_counts_and_no_nan():
    nothing = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0]] * 3), "response_mask": torch.zeros(3, 4)}
    out = m.compute_data_metrics(make_batch(columns=nothing))
    assert out["response/aborted_ratio"] == 1.0
    assert "reward/mean" not in out
    assert all(np.isfinite(value) for value in out.values())


def validated(sources, uids, scores, parts=None):
    """The scored samples of a validation."""
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor([[0.0, score] for score in scores])},
        non_tensors={
            name: np.fromiter(column, dtype=object, count=len(scores))
            for name, column in {
                "data_source": sources,
                "uid": uids,
                "reward_parts": [{}] * len(scores) if parts is None else parts,
            }.items()
        },
    )


def validation_metrics(sources, uids, scores, parts=None, *, num_samples):
    return m.validation_metrics(validated(sources, uids, scores, parts), num_samples)


def test_a_validation_with_answers_has_a_majority_vote():
    batch = validated(["sums"] * 2, ["a"] * 2, [1.0, 1.0], [{"pred": "3"}, {"pred": "3"}])
    assert m.validation_metrics(batch, num_samples=2)["val/sums/maj@2"] == 1.0


@pytest.mark.parametrize(("parts", "passed"), [({"acc": 1.0}, 1.0), ({"acc": True}, 1.0), ({"acc": 0.5}, 0.0), ({}, 0)])
def test_what_the_reward_function_calls_acc_decides_what_passes(parts, passed):
    metrics = m.validation_metrics(
        validated(["sums"] * 2, ["a"] * 2, [0.5, 0.5], [parts, parts]), num_samples=2
    )  # the most that this reward gives
    assert (metrics["val/sums/pass@2"], metrics["val/sums/mean@2"]) == (passed, 0.5)


def test_parts_of_a_validation_are_means_over_prompts_of_the_samples_that_have_them():
    parts = [{"right": 1.0, "brief": 0.5}, {"right": 0.0, "brief": None}, {"right": 0.0, "why": "text"}, {"right": 0.0}]
    metrics = validation_metrics(["s", "s", "s", "t"], ["a", "a", "b", "c"], [1.0, 0.0, 0.0, 0.0], parts, num_samples=2)
    assert metrics["val/s/right/mean@2"] == 0.25  # of 0.5 and 0
    assert metrics["val/s/brief/mean@2"] == 0.5 and metrics["val/s/brief/missing"] == 2.0
    assert metrics["val/t/right/mean@2"] == 0.0
    others = {name for name in metrics if "brief" in name or "why" in name or "missing" in name}
    assert others == {"val/s/brief/mean@2", "val/s/brief/missing"}


def test_a_validation_with_a_sample_left_out_has_the_names_of_one_without():
    batch = validated(["sums"] * 2, ["a"] * 2, [1.0, 0.0])
    whole = m.validation_metrics(batch, num_samples=2)
    part = m.validation_metrics(batch.select_idxs([0]), num_samples=2)
    assert set(part) <= set(whole) and set(whole) - set(part) == {"val/sums/pass@2"}
    assert (whole["val/sums/mean@2"], part["val/sums/mean@2"], part["val/sums/n"]) == (0.5, 1.0, 1.0)


def test_validation_averages_over_prompts_and_reports_how_many():
    out = validation_metrics(
        ["add", "add", "add", "add", "mul"], ["p", "p", "q", "q", "r"], [1.0, 0.0, 1.0, 1.0, 0.0], num_samples=2
    )
    assert out["val/add/mean@2"] == 0.75
    assert out["val/add/best@2"] == pytest.approx((0.75 + 1.0) / 2)
    assert out["val/add/pass@2"] == 1.0
    assert (out["val/add/n"], out["val/mul/n"], out["val/mul/mean@2"]) == (2, 1, 0.0)
    assert "val/add/maj@2" not in out


def test_a_prompt_with_a_sample_left_out_is_in_every_metric_that_its_samples_can_say():
    scores = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]  # four of the one prompt, three of the other
    out = validation_metrics(["s"] * 7, ["p"] * 4 + ["q"] * 3, scores, num_samples=4)
    assert set(out) == {
        *(f"val/s/{name}@{k}" for name in ("best", "worst", "pass") for k in (2, 4)),
        *("val/s/mean@4", "val/s/std@4", "val/s/n"),
    }
    assert out["val/s/n"] == 2
    assert (out["val/s/mean@4"], out["val/s/std@4"]) == (0.75, 0.25)
    assert out["val/s/best@4"] == pytest.approx((1 - 0.5**4 + 1) / 2)
    assert out["val/s/worst@2"] == pytest.approx((0.5**2 + 1) / 2)
    assert out["val/s/pass@2"] == pytest.approx((1 - 1 / 6 + 1) / 2)
    assert out["val/s/pass@4"] == 1.0  # of the first prompt: the second has three samples, not four


def test_the_names_follow_from_n_and_not_from_what_is_missing():
    rng = np.random.default_rng(0)
    names = {f"val/s/{name}@{k}" for name in ("best", "worst", "maj") for k in (2, 4, 5)} | {
        f"val/s/{name}" for name in ("mean@5", "std@5", "n")
    }
    for _ in range(20):
        sizes = rng.integers(1, 6, size=3)
        uids = [uid for uid, size in enumerate(sizes) for _ in range(size)]
        arguments = (["s"] * len(uids), uids, rng.random(len(uids)).tolist(), [{"pred": "1"}] * len(uids))
        out = validation_metrics(*arguments, num_samples=5)
        assert set(out) == names | {f"val/s/pass@{k}" for k in (2, 4, 5) if k <= sizes.max()}


def test_more_samples_than_n_name_the_prompt():
    with pytest.raises(ValueError, match=r"prompt q \(source 's'\) has 2 samples, but n is 1"):
        validation_metrics(["s"] * 3, ["p", "q", "q"], [0.0] * 3, num_samples=1)


def test_what_is_correct_is_said_by_acc_or_else_by_the_score():
    assert m.answers_that_are_correct([{"acc": 1}, {"acc": 0.5}, {"acc": True}]) == [True, False, True]
    assert m.answers_that_are_correct([{"acc": 1}, {}]) is None
    assert m.answers_that_are_correct([{"acc": "yes"}]) is None
    assert m.answers_that_are_correct([]) is None
    scores = [0.5, 0.25]  # a reward that ends at 0.5
    told = validation_metrics(["s"] * 2, ["p"] * 2, scores, [{"acc": 1}, {"acc": 0}], num_samples=2)
    untold = validation_metrics(["s"] * 2, ["p"] * 2, scores, num_samples=2)
    assert (told["val/s/pass@2"], untold["val/s/pass@2"]) == (1.0, 0.0)


def test_validation_of_ragged_prompts_and_several_sources_is_that_of_each_prompt_alone():
    rng = np.random.default_rng(5)
    sizes = {("add", "p"): 4, ("add", "q"): 4, ("add", "r"): 2, ("mul", "p"): 3, ("mul", "s"): 1}
    rows = [key for key, size in sizes.items() for _ in range(size)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    scores = rng.integers(0, 2, len(rows)).astype(float).tolist()
    whole = validation_metrics([s for s, _ in rows], [u for _, u in rows], scores, num_samples=4)

    def of_prompt(source, own):
        return validation_metrics([source] * len(own), ["x"] * len(own), own, num_samples=4)

    alone = {}
    for key in sizes:
        own = [score for row, score in zip(rows, scores, strict=True) if row == key]
        for name, value in of_prompt(key[0], own).items():
            alone.setdefault(name, []).append(value)
    expected = {name: sum(values) if name.endswith("/n") else np.mean(values) for name, values in alone.items()}
    assert whole == pytest.approx(expected)


def test_a_majority_is_voted_among_what_the_reward_function_calls_pred():
    parts = [{"pred": "7"}, {"pred": "7", "brief": 1.0}, {"pred": None}]
    assert m.answers_voted_on(parts) == ["7", "7", None]
    assert m.answers_voted_on([*parts, {"brief": 1.0}]) is None
    assert m.answers_voted_on([]) is None
    out = validation_metrics(["s"] * 3, ["p"] * 3, [1.0, 1.0, 0.0], parts, num_samples=3)
    # Three draws: P(at least two of the right answer) with p = 2/3 is 20/27.
    assert out["val/s/maj@3"] == pytest.approx(20 / 27, abs=0.05)
    # Two draws: both right 4/9, a tie 4/9 that either wins.
    assert out["val/s/maj@2"] == pytest.approx(4 / 9 + 2 / 9, abs=0.05)


def test_validation_leaves_the_global_generators_alone_and_repeats_itself():
    arguments = (["s"] * 4, ["p"] * 4, [1.0, 0.0, 0.0, 1.0], [{"pred": pred} for pred in "1221"])
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    first = validation_metrics(*arguments, num_samples=4)
    assert np.array_equal(np.random.get_state()[1], before)
    assert first == validation_metrics(*arguments, num_samples=4)


def test_validation_refuses_a_score_that_is_no_number():
    with pytest.raises(ValueError, match="sample 1 .*'add'.*nan"):
        validation_metrics(["add", "add"], ["p", "q"], [1.0, float("nan")], num_samples=1)
