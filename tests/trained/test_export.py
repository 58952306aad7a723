"""What an export leaves loads as what was trained, from `hf` and from shards alone."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from hrl import cli
from hrl.cluster.manifest import Manifest
from hrl.models.adapter import AdapterSource, decoder_linears
from hrl.models.four_bit import rounded
from hrl.models.source import ModelSourceError
from hrl.models.tokenizer import TokenIds
from hrl.report.run_folder import DamagedFileError
from hrl.trained.export import Exported, ExportError, _read_shards, _step, export, model_card, push
from hrl.trained.folders import Trained, find_trained, require_loadable
from hrl.workers.engine.host_memory import local
from hrl.workers.rollout.host import RolloutHost
from tests.data.conftest import make_tokenizer
from tests.models.tiny import (
    actor_config,
    critic_config,
    fsdp_config,
    model_config,
    run_ranks,
    save_llama,
    save_mixture,
)
from tests.workers.asked import Actor, Critic
from tests.workers.engine.ranks import CPU, policy_of, train_and_save
from tests.workers.rollout.models import VOCAB, save_tiny_llama
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows

WORDS = "two and three make five"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(params=["llama", "qwen3_moe"])
def base(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model to start from, with its tokenizer and the settings of its generation."""
    folder = tmp_path / "base"
    if request.param == "llama":
        save_llama(folder)
    else:
        save_mixture(folder, "qwen3_moe")
    tokenizer.save_pretrained(folder)
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path, world: None, tokenizer: PreTrainedTokenizerFast) -> Iterator[Path]:
    """A checkpoint of a trained policy in the folder of its run."""
    yield as_run(base, tmp_path, lambda folder: change_and_save(base, folder), tokenizer)


def change_and_save(base: Path, folder: Path) -> None:
    """Stands for training: every weight changes."""
    engine = policy_of(base, "float32").engine
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.25)
    engine.save(folder / "state")
    engine.export_hf(folder / "hf")


def seal(checkpoint: Path) -> None:
    """Write the manifest of what is there."""
    Manifest.of(checkpoint, 2, score=0.5).write(checkpoint)


def as_run(base: Path, tmp_path: Path, train: Any, tokenizer: PreTrainedTokenizerFast) -> Path:
    checkpoint = tmp_path / "sums" / "checkpoints" / "step_2"
    train(checkpoint)
    (checkpoint / "state").rename(checkpoint / "actor")
    tokenizer.save_pretrained(checkpoint / "hf")
    (checkpoint / "state.json").write_text(json.dumps({"step": 2, "score": 0.5}))
    seal(checkpoint)
    config = {
        "actor_rollout_ref": {
            "model": {"path": str(base), "override_config": {}, "trust_remote_code": False, "tokenizer_path": None},
            "actor": {"optim": {"lr": 0.001}},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": ["sums.jsonl"], "train_batch_size": 8},
    }
    (tmp_path / "sums" / "config.yaml").write_text(yaml.safe_dump(config))
    records = [{"step": 1}, {"step": 2, "val/sums/mean@1": 0.5}, {"step": 3, "val/sums/mean@1": 0.9}]
    (tmp_path / "sums" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return checkpoint


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(1, 12)[None]).logits


def test_shards_alone_make_the_model_of_the_folder_beside_them(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    trained = logits(checkpoint / "hf")
    assert not torch.equal(trained, logits(base))  # it has learnt something
    from_hf = export(str(checkpoint), tmp_path / "from_hf")
    shutil.rmtree(checkpoint / "hf")
    from_shards = export(str(checkpoint), tmp_path / "from_shards")
    for exported in (from_hf, from_shards):
        assert torch.equal(logits(exported.folder), trained)
        assert exported.dtype == "float32" and exported.weights_bytes > 0
        assert AutoTokenizer.from_pretrained(exported.folder).chat_template is not None
    assert GenerationConfig.from_pretrained(from_shards.folder).temperature == 0.6
    assert not list(tmp_path.glob("*.unfinished"))


def train_adapter(base: Path, folder: Path, *, load_in_4bit: bool = False) -> None:
    adapter = AdapterSource(
        rank=4,
        alpha=8,
        target_modules="all-linear",
        exclude_modules=("k_proj",),
        use_rslora=True,
        path=None,
        seed=0,
        merge=True,
        load_in_4bit=load_in_4bit,
    )
    engine = Actor(
        model_config(base, adapter=adapter), actor_config(), fsdp_config("float32"), device=CPU, total_steps=1
    ).engine
    with torch.no_grad():
        for parameter in engine.optimizer.parameters:
            local(parameter).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    engine.save(folder / "state")
    engine.export_hf(folder / "hf")


def test_an_adapter_is_added_to_the_weights_that_it_was_trained_beside_and_to_no_others(
    base: Path, tmp_path: Path, world: None, bitsandbytes: None, tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = as_run(base, tmp_path, lambda folder: train_adapter(base, folder, load_in_4bit=True), tokenizer)
    (tmp_path / "sums" / "config.yaml").unlink()  # the folder of the adapter alone says enough
    config = json.loads((checkpoint / "hf" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and "load_in_4bit" not in config
    exported = export(str(checkpoint / "hf"), tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for linear in decoder_linears(model).values():
            linear.weight.copy_(rounded(linear.weight))
        own = PeftModel.from_pretrained(model, str(checkpoint / "hf"))(torch.arange(1, 12)[None]).logits
    assert torch.allclose(logits(exported.folder), own, rtol=0, atol=1e-5)

    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    file = checkpoint / "hf" / "adapter_config.json"
    file.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "other")}))
    seal(checkpoint)
    with pytest.raises(ExportError, match="trained beside other weights than those of .*other.*: their checksum was"):
        export(str(checkpoint / "hf"), tmp_path / "refused")


def test_an_adapter_is_added_to_its_model_from_its_folder_and_from_shards_alone(
    base: Path, tmp_path: Path, world: None, tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = as_run(base, tmp_path, lambda folder: train_adapter(base, folder), tokenizer)
    config = yaml.safe_load((tmp_path / "sums" / "config.yaml").read_text())
    asked = {"lora_rank": 4, "lora_alpha": 8, "exclude_modules": ["k_proj"], "use_rslora": True}
    config["actor_rollout_ref"]["model"] |= asked
    (tmp_path / "sums" / "config.yaml").write_text(yaml.safe_dump(config))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        own = PeftModel.from_pretrained(model, str(checkpoint / "hf"))(torch.arange(1, 12)[None]).logits

    with pytest.raises(ModelSourceError, match="holds an adapter without its model: merge the two with `hrl export"):
        require_loadable(find_trained(str(checkpoint)))
    from_hf = export(str(checkpoint), tmp_path / "from_hf")
    shutil.rmtree(checkpoint / "hf")
    from_shards = export(str(checkpoint), tmp_path / "from_shards")
    for exported in (from_hf, from_shards):
        assert torch.allclose(logits(exported.folder), own, rtol=0, atol=1e-5)
        assert AutoTokenizer.from_pretrained(exported.folder).chat_template is not None
    assert (own - logits(base)).abs().max() > 1e-2
    state = checkpoint / "actor" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"base_checksum": 1}))
    seal(checkpoint)
    with pytest.raises(ExportError, match="their checksum was 1 and is"):
        export(str(checkpoint), tmp_path / "others")


@pytest.mark.parametrize("base", ["llama"], indirect=True)
@pytest.mark.parametrize("shards_only", [False, True])
def test_another_dtype_halves_the_weights(checkpoint: Path, tmp_path: Path, shards_only: bool) -> None:
    whole = export(str(checkpoint), tmp_path / "whole")
    if shards_only:
        shutil.rmtree(checkpoint / "hf")
    half = export(str(checkpoint), tmp_path / "half", "bfloat16")
    assert half.weights_bytes < 0.6 * whole.weights_bytes
    assert json.loads((half.folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(half.folder)
    assert model.dtype == torch.bfloat16
    assert torch.equal(
        model.model.norm.weight, AutoModelForCausalLM.from_pretrained(whole.folder).model.norm.weight.bfloat16()
    )


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_shards_of_a_reward_model_make_the_classifier_of_the_folder_beside_them(
    base: Path, tmp_path: Path, world: None
) -> None:
    tokenizer = make_tokenizer(pad_token="!")  # one that the small vocabulary of the model has
    tokenizer.save_pretrained(base)

    def train(folder: Path) -> None:
        critic = Critic(model_config(base), critic_config(), fsdp_config("float32"), device=CPU, total_steps=10)
        with torch.no_grad():
            for parameter in critic.engine.module.parameters():
                parameter.mul_(1.25).add_(0.01)  # the head began at zero
        critic.engine.save(folder / "state")
        critic.begin_export(folder / "hf", None, pad_token_id=tokenizer.pad_token_id)
        critic.engine.finish_save()

    checkpoint = as_run(base, tmp_path, train, tokenizer)
    (checkpoint / "actor").rename(checkpoint / "rm")
    seal(checkpoint)
    file = tmp_path / "sums" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({"model": config["actor_rollout_ref"]["model"], "data": config["data"]}))

    def scores(folder: Path) -> torch.Tensor:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.arange(1, 12)[None]).logits

    trained = scores(checkpoint / "hf")
    assert trained.shape == (1, 1) and trained.abs().item() > 0
    shutil.rmtree(checkpoint / "hf")
    seal(checkpoint)
    out = export(str(checkpoint), tmp_path / "out").folder
    assert torch.equal(scores(out), trained)
    assert "| algorithm | reward model |" in (out / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(out).pad_token_id == tokenizer.pad_token_id
    shutil.rmtree(checkpoint / "rm")
    seal(checkpoint)
    with pytest.raises(ExportError, match="neither hf, nor actor, nor rm"):
        export(str(checkpoint), tmp_path / "other")


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_a_link_out_of_a_models_folder_is_not_exported(base: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_secret")
    stranger = shutil.copytree(base, tmp_path / "stranger")
    (stranger / "vocab.txt").symlink_to(tmp_path / "token")
    with pytest.raises(ModelSourceError, match=r"vocab\.txt is a link to .*outside of the model's folder"):
        export(str(stranger), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if path != base) == ["stranger", "token"]


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_an_export_removes_nothing_that_it_did_not_make(base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.unfinished" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    exported = export(str(base), tmp_path / "new" / "out")
    export(str(base), tmp_path / "out")
    assert mine.read_text() == "mine"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert exported.folder.stat().st_mode & 0o077 == base.stat().st_mode & 0o077  # as any new folder


@pytest.mark.parametrize("base", ["llama"], indirect=True)
@pytest.mark.cluster
def test_shards_of_two_ranks_are_put_together(base: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    checkpoint = as_run(
        base, tmp_path, lambda to: run_ranks(2, tmp_path / "ranks", train_and_save, base, to, 2), tokenizer
    )
    trained = logits(checkpoint / "hf")
    shutil.rmtree(checkpoint / "hf")
    assert torch.equal(logits(export(str(checkpoint), tmp_path / "out").folder), trained)


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_the_card_says_how_the_model_was_made_and_what_it_scored(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(checkpoint.parents[1]), str(tmp_path / "adder")]) == 0
    card = (tmp_path / "adder" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [hrl]\n---\n")
    assert "base_model" not in card  # a folder is none of the hub
    assert str(tmp_path) not in card and f"| starts from | {base.name} |" in card
    for line in ("| algorithm | grpo |", "| trained on | sums.jsonl |", "| steps | 2 |", "| weights | float32 |"):
        assert line in card
    assert "| val/sums/mean@1 after step 2 | 0.5 |" in card and "0.9" not in card  # which is of a later step


def test_the_card_names_what_is_of_the_hub_and_of_files_only_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    files = ["/secret/place/a.jsonl", "secret/b.parquet?split=train", "openai/gsm8k:main:train"]
    config = {
        "actor_rollout_ref": {"model": {"path": "models/mine"}},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": files},
        "reward": {"custom_reward_function": {"path": "~/secret/my.py"}},
    }
    card = model_card(Trained("run", "run", config=config), "bfloat16", "mine")
    assert "base_model" not in card and "secret" not in card
    for line in ("| starts from | mine |", "| reward | my.py |"):
        assert line in card
    assert "| trained on | a.jsonl, b.parquet?split=train, openai/gsm8k:main:train |" in card
    config["actor_rollout_ref"] = {"model": {"path": "Qwen/Qwen3-0.6B"}}
    card = model_card(Trained("run", "run", config=config), "bfloat16", "mine")
    assert "\nbase_model: Qwen/Qwen3-0.6B\n" in card and "| starts from | Qwen/Qwen3-0.6B |" in card


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_a_folder_that_is_in_use_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    export(str(base), tmp_path / "out")  # an empty one is taken
    assert cli.main(["export", str(base), str(tmp_path / "out")]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "holds no model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_what_can_not_be_read_is_not_told_as_what_can_not_be_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target) if number == errno.ENOSPC else None)

    monkeypatch.setattr("shutil.copyfile", refuses)
    number = errno.EACCES
    with pytest.raises(ExportError, match=r"base can't be read: .*Permission denied: '.*base/"):
        export(str(base), tmp_path / "out")
    number = errno.ENOSPC
    with pytest.raises(ExportError, match="out can't be written: .*No space"):
        export(str(base), tmp_path / "out")
    (base / "config.json").write_text('{"dtype": ')
    with pytest.raises(DamagedFileError, match=r"base/config\.json is damaged"):
        export(str(base), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"step": "two", "tensors": []}'])
def test_a_damaged_state_is_told_and_no_traceback(state: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(state)
    for read in (lambda: _step(Trained("x", "x", tmp_path)), lambda: _read_shards(tmp_path, {})):
        with pytest.raises(DamagedFileError, match=r"state\.json is damaged"):
            read()


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_an_empty_folder_is_filled_from_within_also_after_a_process_that_was_killed(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "theirs" / "out"
    left = out / f".out.{'0' * 16}.unfinished"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    export(str(base), out)
    assert not left.exists() and (out / "config.json").is_file()


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_shards_of_another_model_are_refused(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkpoint / "hf")
    config = json.loads((base / "config.json").read_text())
    shutil.rmtree(base)
    save_mixture(base, "qwen3_moe")
    assert config["model_type"] == "llama"
    with pytest.raises(ExportError, match="the run began with another model"):
        export(str(checkpoint), tmp_path / "out")
    (checkpoint.parents[1] / "config.yaml").unlink()
    with pytest.raises(ExportError, match="lies in no run's folder"):
        export(str(checkpoint), tmp_path / "out")


@pytest.mark.engine
def test_vllm_answers_from_an_export_as_the_trained_model_does(
    tmp_path: Path, world: None, tokenizer: PreTrainedTokenizerFast
) -> None:
    pytest.importorskip("vllm")
    base = save_tiny_llama(tmp_path / "base")
    tokenizer.save_pretrained(base)
    checkpoint = as_run(base, tmp_path, lambda folder: change_and_save(base, folder), tokenizer)
    trained = AutoModelForCausalLM.from_pretrained(checkpoint / "hf", dtype=torch.float32)
    shutil.rmtree(checkpoint / "hf")
    folder = export(str(checkpoint), tmp_path / "out").folder
    prompts = [[3, 5, 7, 11], [2, 4, 8, 16, 32]]
    setup = engine_setup("vllm", folder, TokenIds(0, (1,), VOCAB), 32, dtype="float32")
    with RolloutHost(setup) as host:
        rows = sample_rows(host, prompt_batch(prompts, n=1, width=8), max_tokens=8, temperature=0.0)
    for prompt, answer, mask in zip(prompts, rows.batch["responses"], rows.batch["response_mask"], strict=True):
        whole = trained.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=1)
        assert answer[mask.bool()].tolist() == whole[0, len(prompt) :].tolist()


class Hub(BaseHTTPRequestHandler):
    """What a push asks of a hub, where every file is small enough to be sent within the commit.

    Attributes:
        refuses: Whether the token may not write.
        asked: Path, token and body of every request.
    """

    refuses: ClassVar[bool] = False
    asked: ClassVar[list[tuple[str, str | None, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.path.partition("?")[0], self.headers.get("Authorization"), body))
        repository = f"http://{self.headers['Host']}/me/adder"
        if self.refuses:
            self._answer({"error": "forbidden"}, 403)
        elif self.path == "/api/repos/create":
            self._answer({"url": repository})
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            self._answer({"files": [each | {"shouldIgnore": False, "oid": None} for each in files]})
        elif "/commit/" in self.path:
            self._answer({"commitUrl": f"{repository}/commit/{'a' * 40}", "commitOid": "a" * 40})
        else:
            self._answer({"errors": [], "warnings": []})

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(Hub, "asked", [])
        yield Hub
        server.shutdown()


def test_a_push_creates_a_private_repository_and_commits_every_file(hub: type[Hub], tmp_path: Path) -> None:
    written = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"---\ntags: [hrl]\n---\n# adder\n"}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    address = push(Exported(tmp_path, "float32", 7), "me/adder")
    assert address.startswith("http://127.0.0.1:") and address.endswith("/me/adder")
    (created,) = [json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create"]
    assert created == {"name": "adder", "organization": "me", "visibility": "private"}
    (commit,) = [body for path, _, body in hub.asked if "/commit/" in path]
    lines = [json.loads(line) for line in commit.splitlines()]
    files = {each["value"]["path"]: each["value"]["content"] for each in lines if each["key"] == "file"}
    assert {name: base64.b64decode(content) for name, content in files.items()} == written
    assert {token for path, token, _ in hub.asked if path.startswith("/api/models/")} == {"Bearer hf_secret"}


def test_a_hub_that_refuses_the_token_says_what_to_do(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "refuses", True)
    with pytest.raises(ExportError, match=r"the hub refused 'me/adder': .*token that may write.*The model is in "):
        push(Exported(tmp_path, "float32", 7), "me/adder")


def test_nothing_is_sent_without_a_network_and_the_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise httpx.ConnectError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    with pytest.raises(ExportError, match=r"can't be reached \(no route to host\).*The model is in "):
        push(Exported(tmp_path, "float32", 1), "me/adder")
    monkeypatch.undo()
    with pytest.raises(ExportError, match="is no name of a repository"):
        push(Exported(tmp_path, "float32", 1), "not a/name/at all")
