"""Parts of a reward over many samples."""

from hrl.reward.parts import part_metrics


def test_a_part_is_averaged_over_the_samples_that_have_it_and_the_others_are_counted():
    parts = [{"right": 1.0, "why": "x", "brief": None}, {"right": True, "brief": 0.25}, {"right": 0.0}, {}]
    found = {name: metric.result() for name, metric in part_metrics(parts).items()}
    assert found == {
        "reward/right/mean": 2 / 3,
        "reward/right/missing": 1,
        "reward/brief/mean": 0.25,
        "reward/brief/missing": 3,
    }
    assert part_metrics([]) == {} and part_metrics([{"why": "x"}]) == {}
