"""A sampler chooses by what it has seen, its state resumes it exactly, and what it can't choose is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hrl.data.dataset import RLHFDataset
from hrl.data.order import Position
from hrl.data.sampler import PassRateSampler, PromptSampler, SamplerError, check_choice, load_sampler

PAGE = Path(__file__).parents[2] / "docs" / "your-own-data.md"


@pytest.fixture
def dataset(tokenizer, config, make_row):
    return RLHFDataset([make_row(f"p{n}", level=n % 5) for n in range(40)], tokenizer, config)


def run(sampler, position, steps, rate_of=lambda row: row % 4 / 4):
    """Draw batches of 8; of 4 samples of row `r`, `r % 4` are right."""
    drawn = []
    for _ in range(steps):
        chosen, position = sampler.choose(position, 8)
        check_choice(sampler, chosen, 8, len(sampler.dataset))
        indices = np.repeat(chosen, 4)
        solved = np.tile([0, 1, 2, 3], 8) < np.repeat([rate_of(row) * 4 for row in chosen], 4)
        sampler.update(indices, solved.astype(float), solved)
        drawn.append(chosen)
    return drawn, position


def test_new_prompts_come_first_then_those_that_are_sometimes_solved(dataset):
    sampler = PassRateSampler(dataset, 3, floor=0.01)
    first, position = run(sampler, Position(), 5)
    seen = {row for batch in first for row in batch}
    assert len(seen) >= 30  # of 40; those with a pass rate in between may come again
    late, _ = run(sampler, position, 200)
    counts = np.bincount(np.concatenate(late[20:]), minlength=40)
    by_rate = [counts[rest::4].mean() for rest in range(4)]
    assert by_rate[0] < 0.15 * by_rate[2]  # never solved: 0.01 to 1
    assert by_rate[1] == pytest.approx(by_rate[3], rel=0.3)


def test_the_running_pass_rate_and_its_metrics_are_as_computed_by_hand(dataset):
    sampler = PassRateSampler(dataset, 3, decay=0.75)
    assert sampler.metrics() == {}
    sampler.update(np.array([0, 0, 1, 1, 2, 2]), np.zeros(6), np.array([1, 0, 0, 0, 1, 1], dtype=bool))
    sampler.update(np.array([0, 0]), np.zeros(2), np.array([1, 1], dtype=bool))
    assert sampler.rates[:3].tolist() == [0.75 * 0.5 + 0.25 * 1, 0.0, 1.0]
    assert sampler.metrics() == {
        "data/pass_rate/mean": pytest.approx(1.625 / 3),
        "data/pass_rate/never_solved": pytest.approx(1 / 3),
        "data/pass_rate/always_solved": pytest.approx(1 / 3),
        "data/pass_rate/seen": 3 / 40,
    }


def test_a_resumed_run_draws_what_the_straight_one_draws(dataset):
    straight = PassRateSampler(dataset, 3)
    _, position = run(straight, Position(), 7)
    state = straight.state_dict()
    resumed = PassRateSampler(dataset, 3)
    resumed.load_state_dict(state)
    assert run(resumed, position, 9)[0] == run(straight, position, 9)[0]


def test_the_shares_of_sources_are_kept(tokenizer, config, tmp_path):
    for name, count in (("a", 90), ("b", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{n}"}}\n' for n in range(count)))
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 4.0}, {"path": str(tmp_path / "b.jsonl"), "weight": 1.0}]
    sampler = PassRateSampler(RLHFDataset(sources, tokenizer, config), 3)
    position, drawn = Position(), []
    for _ in range(300):
        chosen, position = sampler.choose(position, 5)
        sampler.update(np.array(chosen), np.zeros(5), np.array(chosen) >= 90)  # the small source is always solved
        assert sum(row >= 90 for row in chosen) == 1
        check_choice(sampler, chosen, 5, 100)
        drawn += chosen
    assert len(set(drawn)) > 50


@pytest.mark.parametrize("sampler_of", [PassRateSampler, PromptSampler])
def test_a_source_that_is_smaller_than_its_share_of_a_batch_gives_rows_twice(tokenizer, config, tmp_path, sampler_of):
    for name, count in (("a", 30), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{n}"}}\n' for n in range(count)))
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    sampler = sampler_of(RLHFDataset(sources, tokenizer, config), 3)
    position = Position()
    for _ in range(5):
        chosen, position = sampler.choose(position, 10)
        check_choice(sampler, chosen, 10, 32)
        assert sorted(chosen.count(row) for row in (30, 31)) == [2, 3]


def test_the_sampler_of_the_page_works(dataset, tmp_path):
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "EasyFirst" in code)
    (tmp_path / "easy_first.py").write_text(code)
    sampler = load_sampler({"name": f"{tmp_path}/easy_first.py:EasyFirst"}, dataset, 3)
    chosen, position = sampler.choose(Position(), 8)
    check_choice(sampler, chosen, 8, 40)
    assert {row % 5 for row in chosen} == {0}
    assert position == Position(0, 8)
    late, _ = sampler.choose(Position(9), 8)
    assert len({row % 5 for row in late}) > 1
    assert sampler.choose(Position(), 8)[0] == chosen


VERL = """
class Backwards:
    def __init__(self, data_source, data_config):
        self.rows = range(len(data_source) - 1, -1, -1)
        self.told = []

    def __iter__(self):
        return iter(self.rows)

    def update(self, batch):
        self.told.append(batch)
"""


def test_a_sampler_of_verl_is_iterated(dataset, tmp_path):
    (tmp_path / "verl_like.py").write_text(VERL)
    settings = {"class_path": str(tmp_path / "verl_like.py"), "class_name": "Backwards"}
    sampler = load_sampler(settings, dataset, 3, section=None)
    position, drawn = Position(), []
    for _ in range(4):
        chosen, position = sampler.choose(position, 12)
        drawn.append(chosen)
    assert [batch[0] for batch in drawn] == [39, 27, 15, 39]  # the last 4 of an iteration fill no batch
    sampler.observe("the batch", np.zeros(1), np.zeros(1, dtype=bool))
    assert sampler._made.told == ["the batch"]
    again = load_sampler(settings, dataset, 3)
    again.load_state_dict(sampler.state_dict())
    assert again.choose(position, 12) == sampler.choose(position, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "pas_rate"}, "there is no sampler 'pas_rate'. Did you mean pass_rate?"),
        ({"class_name": "Curriculum"}, "there is no sampler 'Curriculum'"),
        ({"name": "pass_rate", "flor": 0.1}, "PassRateSampler has no option 'flor'. Did you mean floor?"),
        ({"name": "pass_rate", "floor": 0}, "floor of pass_rate is 0, expected a number more than 0 and at most 1"),
        ({"name": "no.py:Mine"}, "no.py does not exist"),
        ({"name": "{here}/bad.py:Mine"}, "bad.py raises ZeroDivisionError"),
        ({"name": "{here}/ok.py:Mine"}, "no subclass of hrl.data.sampler.PromptSampler named 'Mine'. It has Other"),
        ({"path": "{here}/ok.py", "name": "Other", "seed_of": 3}, "Other has no option 'seed_of'"),
        ({"path": "{here}/ok.py", "name": "Breaks"}, "Breaks of {here}/ok.py can't be made: KeyError: 'level'"),
    ],
)
def test_what_is_no_sampler_says_why(dataset, tmp_path, settings, message):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    (tmp_path / "ok.py").write_text(
        "from hrl.data.sampler import PromptSampler\n"
        "class Other(PromptSampler):\n    pass\n"
        "class Breaks:\n"
        "    def __init__(self, data_source, data_config):\n        {}['level']\n"
        "    def __iter__(self):\n        return iter([])\n"
    )
    filled = {
        key: value.replace("{here}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    with pytest.raises(SamplerError) as caught:
        load_sampler(filled, dataset, 3)
    assert message.replace("{here}", str(tmp_path)) in str(caught.value)


def test_a_choice_that_is_no_batch_is_refused(dataset):
    sampler = PromptSampler(dataset, 3)
    assert sampler.choose(Position(), 8) == dataset.draw(Position(), 8)
    wrong = {(1, 2): "2 different rows of 2", (1, 1, 2): "2 different rows of 3", (0, 1, 40): "row 40"}
    for chosen, message in wrong.items():
        with pytest.raises(SamplerError, match=message):
            check_choice(sampler, list(chosen), 3, 40)
