import json
from types import SimpleNamespace

import numpy as np
import pytest

from hrl.data.dataset import RLHFDataset
from hrl.data.fingerprint import differences, fingerprint
from hrl.data.offline.pairs import PairDataset
from hrl.data.sampler import EpochOrder

ROWS = [[1, 2, 3], [4, 5], [6]]


def of(rows=ROWS, seed=1, shuffle=True, dtype=np.int32):
    return fingerprint(EpochOrder(len(rows), seed, shuffle), [np.array(row, dtype=dtype) for row in rows])


def test_the_same_rows_in_the_same_order_differ_in_nothing_also_after_a_file():
    assert differences(json.loads(json.dumps(of())), of()) == []
    assert of(dtype=np.int64) == of()


def test_the_digest_is_the_same_on_every_machine():
    assert of()["tokens"] == "c256e2ec94540de1a9e5c8d23bb1eba0"


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4, 5], [6]], [[4, 5], [1, 2, 3], [6]], [[1, 2, 3], [4, 5], [7]]])
def test_a_shifted_an_exchanged_and_another_token_are_other_rows(rows):
    (found,) = differences(of(), of(rows))
    assert "other tokens" in found


def test_each_difference_is_named_with_both_values():
    assert differences(of(), of(ROWS[:2], seed=7)) == ["2 rows, were 3", "data.seed=7, was 1"]
    assert differences(of(), of(shuffle=False)) == ["data.shuffle=False, was True"]


def test_a_seed_that_shuffles_nothing_makes_no_difference():
    assert differences(of(seed=1, shuffle=False), of(seed=2, shuffle=False)) == []


def test_prompts_that_a_lower_limit_filters_are_other_data(tokenizer, config, make_row):
    rows = [make_row("a" * length) for length in (1, 8)]
    config.filter_overlong_prompts = True
    config.max_prompt_length = 100
    full, again = (RLHFDataset(rows, tokenizer, config) for _ in range(2))
    assert differences(full.fingerprint, again.fingerprint) == []
    config.max_prompt_length = len(full[0]["raw_prompt_ids"])
    assert differences(full.fingerprint, RLHFDataset(rows, tokenizer, config).fingerprint) == ["1 rows, were 2"]


def test_a_pair_whose_rejected_answer_changed_is_other_data(tokenizer):
    keys = {name: name for name in ("prompt", "chosen", "rejected", "margin")}
    data = SimpleNamespace(
        **{f"{name}_key": key for name, key in keys.items()},
        data_source_key="data_source",
        max_length=64,
        truncation="error",
        apply_chat_template_kwargs={},
        bad_rows="error",
        shuffle=True,
        seed=0,
    )

    def pairs(rejected):
        row = {"prompt": "?", "chosen": "y", "rejected": rejected}
        return PairDataset([row], tokenizer, data, stop_ids=[tokenizer.eos_token_id]).fingerprint

    assert differences(pairs("n"), pairs("n")) == []
    assert "other tokens" in differences(pairs("n"), pairs("m"))[0]
