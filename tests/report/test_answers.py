from hrl.report.answers import (
    Series,
    before_and_after_table,
    describe,
    last_validations,
    spread,
    that_differ,
    training_series,
    validation_series,
)
from hrl.report.run_folder import RunFolder
from tests.report.runs import sample


def written(tmp_path, kind, **by_step):
    folder = RunFolder(tmp_path)
    for step, samples in by_step.items():
        folder.write_rollouts(int(step[1:]), samples, kind=kind)
    folder.close()
    return folder.rollouts


def test_steps_are_spread_from_the_first_to_the_last():
    assert spread([0, 5, 10], 4) == [0, 5, 10]
    assert spread(list(range(0, 101, 10)), 4) == [0, 30, 70, 100]
    assert spread([1, 2, 3], 2) == [1, 3]


def test_the_same_prompts_are_followed_and_the_largest_change_is_first(tmp_path):
    rollouts = written(
        tmp_path,
        "val",
        s0=[sample(0, 1.0), sample(1, 0.0), sample(2, 0.5)],
        s4=[sample(0, 1.0), sample(1, 1.0)],
        s8=[sample(0, 1.0), sample(1, 1.0), sample(2, 0.25)],
    )
    found = validation_series(rollouts)
    assert [(each.change, [answer.step for answer in each.answers]) for each in found] == [
        (1.0, [0, 4, 8]),
        (-0.25, [0, 8]),
        (0.0, [0, 4, 8]),
    ]
    assert describe(found, 3) == "1 better, 1 worse, 1 as before"


def test_a_group_is_its_mean_and_its_middle_sample(tmp_path):
    scores = (0.0, 1.0, 0.5, None)
    rollouts = written(tmp_path, "train", s1=[sample(0, score) for score in scores], s2=[sample(0, 1.0)])
    (series,) = training_series(rollouts)
    first = series.answers[0]
    assert (first.score, first.samples, first.sample["score"]) == (0.5, 4, 0.5)


def test_training_prompts_that_came_once_are_not_followed(tmp_path):
    assert training_series(written(tmp_path, "train", s1=[sample(0, 1.0)], s2=[sample(1, 1.0)])) == []


def test_a_prompt_without_a_score_has_no_change(tmp_path):
    (series,) = validation_series(written(tmp_path, "val", s0=[sample(0, None)], s1=[sample(0, 1.0)]))
    assert isinstance(series, Series) and series.change is None


def test_of_many_samples_some_steps_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hrl.report.answers._READ_BYTES", 1000)
    rollouts = written(tmp_path, "train", **{f"s{step}": [sample(0, 1.0)] * 4 for step in range(1, 9)})
    (series,) = training_series(rollouts)
    assert [answer.step for answer in series.answers] == [1, 8]


def test_a_prompt_that_was_right_for_a_while_comes_before_one_that_never_changed(tmp_path):
    rollouts = written(
        tmp_path,
        "val",
        s0=[sample(0, 0.0), sample(1, 0.0)],
        s1=[sample(0, 0.0), sample(1, 1.0)],
        s2=[sample(0, 0.0), sample(1, 0.0)],
    )
    found = validation_series(rollouts)
    assert [series.answers[0].sample["question"] for series in found] == ["What is 1 + 2?", "What is 0 + 2?"]


def test_only_what_differs_is_shown_and_words_count_where_no_score_does(tmp_path):
    first = [sample(0, 1.0), sample(1, 0.0), sample(2, 0.0, response="a")]
    rollouts = written(tmp_path, "val", s0=first, s1=[sample(0, 1.0), sample(1, 1.0), sample(2, 0.0, response="b")])
    found = validation_series(rollouts)
    assert [series.change for series in that_differ(found)] == [1.0]
    assert describe(found, 1) == "1 better, 0 worse, 2 as before"
    others = [series for series in found if not series.change]
    (in_words,) = that_differ(others)
    assert [answer.sample["response"] for answer in in_words.answers] == ["a", "b"]
    assert describe(others, 1) == "0 better, 0 worse, 2 as before in other words"
    assert that_differ(others[:1]) == [] and describe(others[:1], 0) == "0 better, 0 worse, 1 as before, word for word"
    assert (
        str(before_and_after_table(others[:1], 5)) == "before and after: 0 better, 0 worse, 1 as before, word for word"
    )


def test_of_more_changes_than_are_shown_the_number_is_told(tmp_path):
    rollouts = written(tmp_path, "val", s0=[sample(n, 0.0) for n in range(5)], s1=[sample(n, n / 4) for n in range(5)])
    assert describe(validation_series(rollouts), 3) == ("4 better, 0 worse, 1 as before; the 3 of 4 that changed most")


def test_prompts_of_different_sources_are_different_prompts(tmp_path):
    rollouts = written(tmp_path, "val", s0=[sample(0, 0.0)], s1=[sample(0, 1.0, data_source="other")])
    assert validation_series(rollouts) == []


def test_runs_are_compared_by_the_mean_of_each_prompt_as_the_page_of_one_is(tmp_path):
    one = written(tmp_path / "one", "val", s3=[sample(0, 1.0), sample(0, 0.0), sample(1, 1.0)])
    other = written(tmp_path / "other", "val", s0=[sample(1, 0.0)], s5=[sample(1, 1.0), sample(0, 1.0), sample(2, 1.0)])
    found = last_validations([one, other])
    assert [[(a.step, a.score, a.samples) for a in series.answers] for series in found] == [
        [(3, 0.5, 2), (5, 1.0, 1)],
        [(3, 1.0, 1), (5, 1.0, 1)],
    ]
    assert last_validations([one, written(tmp_path / "none", "val")]) == []
