"""A model is found, fetched or converted once, and a folder without whole weights is refused with the way out."""

import json
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.numpy import save_file

import hrl.models.gguf
from hrl.errors import HrlError, RefusedError, UnreachableError
from hrl.models import source as model_source
from hrl.models.gguf import GgufError, _to_half_split_rotary, hf_name
from hrl.models.source import (
    MANIFEST_NAME,
    ModelSourceError,
    check_links,
    check_unquantised,
    check_weights,
    find_model,
    find_on_this_node,
    model_facts,
    resolve_model,
)
from hrl.models.tokenizer import load_tokenizer

NAME = "bundled:smollm2-135m-instruct"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A made-up package with a GGUF file, and a converter that copies it slowly; returns the file and the calls."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"first")
    calls = []

    def convert(file, folder):
        calls.append(file.read_bytes())
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(file.read_bytes())

    monkeypatch.setenv("HRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_source, "_find_gguf", lambda bundled: source)
    monkeypatch.setattr(hrl.models.gguf, "convert_gguf", convert)
    return source, calls


def test_a_bundled_model_is_converted_once_also_by_many_at_a_time(package):
    _, calls = package
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(NAME))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 5 and len(set(found)) == 1
    assert sorted(p.name for p in found[0].iterdir()) == ["config.json", MANIFEST_NAME, "model.safetensors"]


def test_another_source_is_converted_anew(package):
    source, calls = package
    first = resolve_model(NAME)
    source.write_bytes(b"second")
    second = resolve_model(NAME)
    assert calls == [b"first", b"second"]
    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"second"


@pytest.mark.parametrize("damage", ["shorten", "remove", "lose the manifest", "cut the manifest"])
def test_a_damaged_copy_is_made_again(package, damage):
    _, calls = package
    folder = resolve_model(NAME)
    if damage == "shorten":
        (folder / "model.safetensors").write_bytes(b"fi")
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "cut the manifest":
        (folder / MANIFEST_NAME).write_text('{"files_by')
    else:
        (folder / MANIFEST_NAME).unlink()
    assert (resolve_model(NAME) / "model.safetensors").read_bytes() == b"first"
    assert len(calls) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(package, monkeypatch, tmp_path):
    def convert(file, folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(hrl.models.gguf, "convert_gguf", convert)
    with pytest.raises(OSError, match="disk full"):
        resolve_model(NAME)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()] == []


def test_waiting_for_another_process_has_an_end(package, monkeypatch):
    thread = threading.Thread(target=resolve_model, args=(NAME,))
    thread.start()
    time.sleep(0.05)
    monkeypatch.setattr(model_source, "CONVERSION_WAIT_S", 0.01)
    with pytest.raises(ModelSourceError, match="waited 0 s for another process"):
        resolve_model(NAME)
    thread.join()


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    with pytest.raises(ModelSourceError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_what_does_not_exist_is_named(tmp_path):
    with pytest.raises(ModelSourceError, match="unknown bundled model 'bundled:smollm'; there are: bundled:smollm2"):
        resolve_model("bundled:smollm")
    with pytest.raises(ModelSourceError, match=f"{tmp_path}/nothing does not exist"):
        resolve_model(tmp_path / "nothing")


def test_gguf_names_become_transformers_names():
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(GgufError, match=r"unknown tensor 'blk.0.mystery.weight'"):
        hf_name("blk.0.mystery.weight")


def test_rotary_pairs_move_half_a_head_apart():
    """Two heads of four rows: neighbours (0,1), (2,3) turn together in GGUF, halves (0,2), (1,3) in transformers."""
    rows = torch.arange(8.0).reshape(8, 1).numpy()
    assert _to_half_split_rotary(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.engine
def test_the_bundled_model_equals_what_transformers_makes_of_it():
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    folder = resolve_model(NAME)
    source = model_source._find_gguf(model_source.BUNDLED_MODELS["smollm2-135m-instruct"])
    peer = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    ours = load_file(folder / "model.safetensors")
    theirs = {name: value for name, value in peer.state_dict().items() if name != "lm_head.weight"}  # tied
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    made, expected = AutoConfig.from_pretrained(folder).to_dict(), peer.config.to_dict()
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
    ):
        assert made[key] == expected[key], key


@pytest.mark.engine
def test_the_bundled_tokenizer_splits_digits_off_and_ends_turns():
    from hrl.data.chat import check_chat_template
    from hrl.models.tokenizer import load_tokenizer, token_ids

    folder = resolve_model(NAME)
    tokenizer = load_tokenizer(folder)
    ids = token_ids(tokenizer, folder)
    assert (ids.pad, ids.stop, ids.vocab_size) == (2, (2,), 49152)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n123")) == ["ĊĊ", "1", "2", "3"]
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    assert check_chat_template(tokenizer, chat, ids.stop).prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_folder_that_every_node_has_is_taken_as_it_is(package):
    folder = resolve_model(NAME)
    assert find_on_this_node(str(folder)) == folder


def test_a_bundled_model_is_converted_on_a_node_that_lacks_it(package, monkeypatch, tmp_path):
    folder = resolve_model(NAME)
    monkeypatch.setenv("HRL_CACHE", str(tmp_path / "another node"))
    shutil.rmtree(folder)
    found = find_on_this_node(folder)
    assert found.is_relative_to(tmp_path / "another node") and found.name == folder.name
    assert (found / "model.safetensors").read_bytes() == b"first"


def test_a_node_whose_package_holds_another_model_is_refused(package, tmp_path):
    source, _ = package
    folder = resolve_model(NAME)
    shutil.rmtree(folder)
    source.write_bytes(b"second")
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: model folder {folder}.*driver's version"):
        find_on_this_node(folder)


def test_a_hub_model_is_fetched_at_the_revision_of_the_driver(monkeypatch, tmp_path):
    asked, mine = [], tmp_path / "mine" / "abc123"

    def snapshot_download(hub_id, revision, allow_patterns):
        asked.append((hub_id, revision))
        mine.mkdir(parents=True)
        (mine / "model.safetensors").touch()
        return str(mine)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_on_this_node(tmp_path / "hub" / "models--org--some-model" / "snapshots" / "abc123") == mine
    assert asked == [("org/some-model", "abc123")]


def test_a_hub_that_cannot_be_reached_is_reported_with_node_and_folder(monkeypatch, tmp_path):
    def snapshot_download(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = tmp_path / "models--org--some-model" / "snapshots" / "abc123"
    with pytest.raises(UnreachableError, match=f"node {socket.gethostname()}: model folder {folder}.*no route to host"):
        find_on_this_node(folder)


def answer_of_hub(status: int) -> HfHubHTTPError:
    said = f"{status} Error. (Request ID: 1)\n\nRepository Not Found\n" + "and more " * 100
    return HfHubHTTPError(said, response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer_of_hub(404), ModelSourceError),
        (answer_of_hub(401), ModelSourceError),
        (answer_of_hub(503), UnreachableError),
        (answer_of_hub(429), UnreachableError),  # too many requests: later it may answer
        (LocalEntryNotFoundError("check your connection"), UnreachableError),
        (ConnectionError("no route to host"), UnreachableError),
    ],
)
def test_what_a_hub_says_is_told_in_one_line_and_asking_again_may_help_if_it_gave_no_answer(monkeypatch, said, kind):
    def snapshot_download(*_, **__):
        raise said

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(HrlError, match=r"from the hub \(and there is no folder nosuch here\): ") as told:
        resolve_model("nosuch")
    assert type(told.value) is kind and issubclass(ModelSourceError, RefusedError)
    assert not issubclass(UnreachableError, RefusedError), "a command ends with status 1 and not 2"
    assert "\n" not in str(told.value) and "; give a local folder" in str(told.value) and len(str(told.value)) < 500
    if isinstance(said, HfHubHTTPError):
        assert "(Request ID: 1) Repository Not Found and more" in str(told.value) and " …" in str(told.value)


def test_the_name_of_a_run_that_is_not_here_is_answered_with_the_folder_that_is(monkeypatch, tmp_path):
    def snapshot_download(*_, **__):
        raise answer_of_hub(404)

    (tmp_path / "my_sums").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelSourceError, match=r"no folder my_sum here \(did you mean my_sums\?\)"):
        resolve_model("my_sum")


@pytest.mark.parametrize("parts", [("home", "model"), ("home", "models", "mine")])
def test_a_users_folder_that_a_node_lacks_is_named_with_the_node(tmp_path, parts):
    folder = tmp_path.joinpath(*parts)
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: model folder {folder}.*on every node"):
        find_on_this_node(folder)


# ---- model folders: nothing is loaded


def refusal(folder: Path) -> str:
    with pytest.raises(ModelSourceError) as caught:
        check_weights(folder)
    return str(caught.value)


def save(file: Path) -> None:
    save_file({"weight": np.arange(100, dtype=np.float32)}, file)


def test_whole_weights_pass_in_one_file_or_in_several(tmp_path):
    save(tmp_path / "model.safetensors")
    check_weights(tmp_path)
    save(tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors, one of 1 files that model.safetensors.index.json" in refusal(
        tmp_path
    )
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is not an index of weights" in refusal(tmp_path)


def test_numbered_weights_without_an_index_are_refused_unless_all_are_there(tmp_path):
    save(tmp_path / "model-00001-of-00003.safetensors")
    save(tmp_path / "model-00003-of-00003.safetensors")
    assert "lacks model-00002-of-00003.safetensors, which the names of its other files count" in refusal(tmp_path)
    save(tmp_path / "model-00002-of-00003.safetensors")
    check_weights(tmp_path)


def test_a_file_that_leads_out_of_the_models_folder_is_refused_with_where_it_leads(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("vocab.txt", "generation_config.json", "code.py", "additional_chat_templates/tool.jinja"):
        (folder / name).symlink_to(secret)
        with pytest.raises(ModelSourceError, match=f"{folder / name} is a link to {secret}, outside of the model's"):
            check_links(folder)
        with pytest.raises(ModelSourceError, match="outside of the model's folder"):
            load_tokenizer(folder)
        (folder / name).unlink()
    (folder / "additional_chat_templates").rmdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(ModelSourceError, match="additional_chat_templates is a link"):
        check_links(folder)


def test_links_inside_a_models_folder_of_a_hubs_snapshot_and_of_weights_are_followed(tmp_path):
    blobs, snapshot = (tmp_path / "models--some--model" / name for name in ("blobs", "snapshots/1"))
    for folder in (blobs, snapshot, tmp_path / "disk"):
        folder.mkdir(parents=True)
    (blobs / "0a1b").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    (snapshot / "copy.json").symlink_to("config.json")
    save(tmp_path / "disk" / "weights")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "disk" / "weights")
    check_links(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    check_links(tmp_path / "link")


def test_weights_that_are_missing_or_of_another_kind_say_what_to_do(tmp_path):
    assert refusal(tmp_path).endswith("has no weights: there is no *.safetensors file in it")
    (tmp_path / "model.gguf").touch()
    assert "only GGUF weights, which can't be trained" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin, and hrl loads no pickled ones. Convert it: transformers." in refusal(tmp_path)


def test_quantised_weights_are_refused_with_their_method(tmp_path):
    for settings in ({"quant_method": "gptq", "bits": 4}, {"quant_method": "mxfp4"}):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        with pytest.raises(ModelSourceError, match=f"quantised by {settings['quant_method']}.*vllm.quantization=fp8"):
            check_unquantised(tmp_path)
    online = {"quant_method": "bitnet", "quantization_mode": "online"}
    for harmless in ({}, {"quantization_config": None}, {"quantization_config": online}):
        (tmp_path / "config.json").write_text(json.dumps(harmless))
        check_unquantised(tmp_path)


def test_a_file_that_was_cut_off_and_a_pointer_are_told_apart(tmp_path):
    file = tmp_path / "model.safetensors"
    save(file)
    file.write_bytes(file.read_bytes()[:-4])
    assert "model.safetensors is incomplete" in refusal(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    assert "is a Git LFS pointer; fetch the file with `git lfs pull`" in refusal(tmp_path)


@pytest.mark.parametrize("find", [find_model, resolve_model])
def test_a_model_path_that_leads_nowhere_is_answered_with_the_nearest_model(tmp_path, monkeypatch, find):
    model = tmp_path / "models" / "qwen"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "weights.gguf").touch()
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").touch()
    monkeypatch.chdir(tmp_path)
    for written, meant in (("./models/qwn", "models/qwen"), ("models/qwn", "models/qwen"), (f"{model}2", str(model))):
        with pytest.raises(ModelSourceError, match=f"does not exist. Did you mean {meant}\\?"):
            find(written)
    for written, message in (
        ("models", "no config.json, but folders in it have: qwen. Name one of them"),
        ("gguf", "holds GGUF files, which can't be trained"),
        ("lora", "holds an adapter without its model; merge the two"),
        ("weights.gguf", "is a file; name a folder"),
        ("~/no/such/model", "does not exist. The folder .* does not exist either"),
    ):
        with pytest.raises(ModelSourceError, match=message):
            find(written)
    assert model_facts(model) == {}


def test_a_hub_id_is_looked_up_in_the_cache_and_not_fetched(tmp_path, monkeypatch):
    asked = []

    def snapshot(repo_id, *, allow_patterns, local_files_only):
        asked.append((repo_id, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_model("org/model") is None  # a snapshot without weights is a download that was broken off
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path / "model.safetensors")
    assert find_model("org/model") == tmp_path
    assert asked == [("org/model", True)] * 2


@pytest.mark.parametrize(("text", "complaint"), [("{", "config.json is not valid JSON"), ("[]", "holds a list")])
def test_a_broken_config_file_is_named(tmp_path, text, complaint):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelSourceError, match=complaint):
        model_facts(tmp_path)
