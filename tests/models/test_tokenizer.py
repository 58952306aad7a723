import json
import shutil
import socket

import pytest

from hrl.models.source import ModelSourceError
from hrl.models.tokenizer import find_tokenizer_on_this_node, load_tokenizer, resolve_tokenizer, token_ids


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


def test_a_tokenizers_folder_is_found_from_other_folders_and_missed_on_other_nodes(tmp_path, monkeypatch, tokenizer):
    tokenizer.save_pretrained(tmp_path / "mine/words")
    monkeypatch.chdir(tmp_path / "mine")
    named = resolve_tokenizer("words")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(find_tokenizer_on_this_node(named)).get_vocab() == tokenizer.get_vocab()
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: .*{tmp_path}/mine/words.*hub id"):
        find_tokenizer_on_this_node(named)


def test_a_hub_id_of_a_tokenizer_stays_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer_on_this_node(resolve_tokenizer("org/words")) == "org/words"


@pytest.mark.parametrize("ids", ["</s>", ["</s>"], [True], [-1], 2**40, {"a": 1}, [None]])
def test_stop_ids_that_are_no_ids_are_refused_with_their_file(tmp_path, tokenizer, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelSourceError, match=r"eos_token_id in .*generation_config\.json is .*, expected the id"):
        token_ids(tokenizer, tmp_path)
