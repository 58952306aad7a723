import json

import pytest

from hrl.data.tokenizer import load_tokenizer, token_ids


def test_stop_ids_are_those_of_tokenizer_and_generation_config(tmp_path, tokenizer):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, tokenizer.eos_token_id]}))
    ids = token_ids(tokenizer, tmp_path)
    assert ids.stop == (tokenizer.eos_token_id, 5)
    assert ids.pad == tokenizer.pad_token_id


def test_without_pad_the_end_token_fills_and_without_both_id_0(tokenizer_with):
    tokenizer = tokenizer_with()
    tokenizer.pad_token = None
    assert token_ids(tokenizer).pad == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert (token_ids(tokenizer).pad, token_ids(tokenizer).stop) == (0, ())


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no usable tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)
