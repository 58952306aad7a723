from hrl.report.answers import Series, describe, spread, training_series, validation_series
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
    assert describe(found) == "1 better, 1 worse, 1 as before"


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
