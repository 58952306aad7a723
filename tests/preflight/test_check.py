"""`hrl check` makes the checks that a run makes, and both say the same."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hrl import cli
from hrl.trainer import main_ppo, main_sft
from tests.preflight.small_run import ROW, SCORE, small_run, write_rows


@pytest.fixture
def line(tmp_path, monkeypatch) -> list[str]:
    """A command line whose files are all there, and its folder to break them in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "120")
    return small_run(tmp_path)


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["check", *arguments])
    return status, capsys.readouterr().err


def broken_files(folder: Path) -> list[str]:
    """A line with one problem of each kind that is found in files."""
    write_rows(folder / "columns.jsonl", [{"question": "one", "data_source": "x"}])
    (folder / "bin").mkdir()
    (folder / "bin" / "config.json").write_text("{}")
    (folder / "bin" / "pytorch_model.bin").touch()
    (folder / "taken").touch()
    return [
        "data.train_files=[rowz.jsonl,columns.jsonl]",
        "data.val_files=policy",
        "actor_rollout_ref.model.path=bin",
        "critic.model.path=./polizy",
        "reward.custom_reward_function.path=rewards.py",
        "trainer.logger=[console,wandb,swanlab]",
        "trainer.default_local_dir=taken",
    ]


def wrong_signature(folder: Path) -> list[str]:
    (folder / "reward.py").write_text("def compute_score(answer, truth):\n    return 1.0\n")
    return ["data.train_batch_size=64"]


def raising_reward(folder: Path) -> list[str]:
    (folder / "reward.py").write_text(f"import no_such_package\n{SCORE}")
    (folder / "policy" / "tokenizer.json").unlink()
    return []


def unknown_sources(folder: Path) -> list[str]:
    return ["reward.custom_reward_function.path=null", "data.max_response_length=512"]


def too_long(folder: Path) -> list[str]:
    write_rows(folder / "long.jsonl", [{**ROW, "prompt": "what " * 40}] * 3)
    return ["data.train_files=long.jsonl", "data.val_files=nothing.parquet"]


@pytest.mark.parametrize("breaking", [broken_files, wrong_signature, raising_reward, unknown_sources, too_long])
def test_check_and_run_refuse_the_same_with_the_same_words(line, tmp_path, capsys, breaking):
    broken = [*line, *breaking(tmp_path)]
    status, said = check(capsys, *broken)
    assert (status, main_ppo.main(broken)) == (2, 2)
    in_the_run = capsys.readouterr().err
    # What a reward function's process says of itself names the process.
    assert [sentence.split(" process ")[0] for sentence in in_the_run.splitlines() if sentence[:3] == "  1"]
    assert said.splitlines() == in_the_run.splitlines()
    assert not (tmp_path / "run").exists()  # nothing was made or started


def test_what_check_finds_in_order_starts(line, capsys, monkeypatch):
    started = []

    def trainer(kind, config, ready, given, trainer_cls, reporter):
        fit = partial(started.append, ready.findings.notes)
        return nullcontext(SimpleNamespace(fit=fit, reporter=reporter, export=lambda folder: folder))

    monkeypatch.setattr("hrl.trainer.run._trainer", trainer)
    monkeypatch.setattr("hrl.trainer.run.run_cluster", lambda *_: nullcontext())
    assert cli.main(["check", *line]) == 0
    shown = capsys.readouterr().out
    assert main_ppo.main(line) == 0
    (warnings,) = started
    assert any("no chat template" in warning for warning in warnings)
    assert "prompts are sent as raw text" in shown


def test_the_offline_trainers_agree_too(line, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text('{"question": "hi"}\n')
    broken = ["model.path=polizy/", "data.train_files=answers.jsonl", "data.val_files=anwers.jsonl"]
    status, said = check(capsys, "sft", *broken)
    assert (status, main_sft.main(broken)) == (2, 2)
    assert said == capsys.readouterr().err


# ---------------------------------------------------------------------- one thing missing: key and nearest file named


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "reward.custom_reward_function.path=rewrd.py",
            "reward.custom_reward_function.path can't be used: {here}/rewrd.py does not exist. Did you mean reward.py?",
        ),
        (
            "data.train_files=row.jsonl",
            "data.train_files can't be used: data file row.jsonl does not exist. Did you mean rows.jsonl?",
        ),
        (
            "data.val_files=rows.json",
            "data.val_files can't be used: data file rows.json does not exist. Did you mean rows.jsonl?",
        ),
        (
            "actor_rollout_ref.model.path=./polcy",
            "actor_rollout_ref.model.path can't be used: model folder polcy does not exist. Did you mean policy?",
        ),
        (
            "data.prompt_key=question",
            "data.prompt_key is question, a column that {here}/rows.jsonl does not have. It has: data_source, prompt, "
            "reward_model. The first row: {{data_source: 'x', prompt: 'what is one plus two', reward_model: "
            "{{'ground_truth': '3'}}}}. Add the column, or name yours with data.prompt_key.",
        ),
        (
            "reward.custom_reward_function.name=score",
            "reward.custom_reward_function.name is score, which {here}/reward.py does not define; it has: "
            "compute_score. Set reward.custom_reward_function.name=compute_score?",
        ),
        (
            "trainer.default_local_dir=rows.jsonl/run",
            "trainer.default_local_dir can't be used: the run folder {here}/rows.jsonl/run can't be created: "
            "{here}/rows.jsonl is a file; name a folder in another place with trainer.default_local_dir.",
        ),
        (
            "actor_rollout_ref.model.tokenizer_path=./no/such",
            "actor_rollout_ref.model.tokenizer_path can't be used: ./no/such is neither a folder nor a hub id.",
        ),
    ],
)
def test_what_is_missing_is_refused_by_key_with_the_way_out(line, tmp_path, capsys, change, sentence):
    status, said = check(capsys, *line, change)
    head, *found = said.splitlines()
    assert status == 2 and head == "1 problem with what the configuration names:"
    assert found == [f"  1. {sentence.format(here=tmp_path)}"]


def test_a_wrong_signature_is_refused(line, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def compute_score(answer, truth, about):\n    return 1.0\n")
    status, said = check(capsys, *line)
    assert status == 2
    assert "reward.custom_reward_function.path can't be used: " in said
    assert "needs truth, about, which nothing gives" in said


def test_a_home_folder_is_found(line, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = ["data.train_files=~/rows.jsonl", "reward.custom_reward_function.path=~/reward.py", "data.val_files=[]"]
    off = ["trainer.val_before_train=false"]
    assert cli.main(["check", *line, *home, *off, "actor_rollout_ref.model.path=~/policy"]) == 0


# ---------------------------------------------------------------------- how it is said


def test_the_summary_is_short_and_says_where_values_come_from(line, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("hrl.preflight.machine_look.gpus_here", lambda: 0)
    monkeypatch.setattr("hrl.preflight.memory_look.memory_here", lambda: 64.0 * 2**30)
    relative = [argument.replace(f"{tmp_path}/", "") for argument in line]
    assert cli.main(["check", *relative, "recipe=rloo", "trainer.save_freq=5"]) == 0
    shown = capsys.readouterr().out.replace(str(tmp_path), "FOLDER")
    lines = [text.rstrip() for text in shown.splitlines()]
    assert lines.index("Memory of this machine at the worst moment of each phase") <= 25 and len(lines) <= 42
    snapshot = Path(__file__).parents[1] / "report" / "snapshots" / "check_120.txt"
    assert lines == snapshot.read_text().splitlines()


def test_everything_is_behind_full_and_in_json(line, capsys):
    assert cli.main(["check", *line, "--full"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for heading in (
        "Configuration",
        "Differs from the default",
        "Units",
        "Found",
        "Placement",
        "Arithmetic",
        "Summary",
    ):
        assert heading in shown
    assert cli.main(["check", "--json", *line]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is True and report["unchecked"] == []
    assert report["found"]["rows"].startswith("4 rows of ")
    assert report["origins"]["data.train_batch_size"] == "yours"
    assert cli.main(["check", "--json", *line, "data.val_files=x.jsonl"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "data.val_files"


def test_functions_with_their_arguments_are_in_json_and_in_full(capsys):
    line = ["check", "--config-only", "data.train_files=x.jsonl", "reward.functions=[{name: length, most: 50}]"]
    assert cli.main([*line, "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)["differs_from_default"]["reward.functions"]
    assert changed["value"][0]["kwargs"] == {"most": 50} and changed["default"] is None
    assert cli.main([*line, "--full"]) == 0
    assert '"kwargs": {"most": 50}' in capsys.readouterr().out.replace("\n", " ")


def test_a_line_for_another_machine_is_judged_alone(capsys, monkeypatch):
    monkeypatch.setattr("hrl.preflight.preflight.inspect_run", None)  # it would fail
    arguments = ["actor_rollout_ref.model.path=/there/model", "data.train_files=/there/train.parquet"]
    assert cli.main(["check", "--config-only", *arguments]) == 0
    assert "No file that it names was opened" in capsys.readouterr().out
    assert cli.main(["check", "--config-only", *arguments, "trainer.sed=1"]) == 2


def test_rows_of_every_kind_show_their_lengths(line, tmp_path, capsys):
    pairs = [{"prompt": "what is", "chosen": "one", "rejected": "one plus two"}] * 4
    write_rows(tmp_path / "pairs.jsonl", pairs)
    own = ["model.path=./policy", "data.train_files=pairs.jsonl", "data.train_batch_size=2", "data.max_length=64"]
    assert cli.main(["check", "dpo", "--json", *own]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert found["rows"] == "4 rows of pairs.jsonl: pairs of answers; rows of 6 tokens; 64 fit"  # 2 + 3, and the end


def test_a_family_that_would_be_trained_wrongly_is_refused_by_check_and_run(line, tmp_path, capsys):
    path = tmp_path / "policy" / "config.json"
    size = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    rest = {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    path.write_text(json.dumps({"model_type": "bert", "is_decoder": True} | size | rest))
    status, said = check(capsys, *line)
    assert status != 0 and "actor_rollout_ref.model.path" in said
    assert "BertLMHeadModel computes something between its last hidden states and its head" in said
    assert check(capsys, *line, "actor_rollout_ref.model.probe=false")[0] == 0
    path.write_text(json.dumps({"model_type": "doge"} | size | rest))
    assert cli.main(["check", "--json", *line]) == 0
    assert "doge computes with its attention mask" in json.loads(capsys.readouterr().out)["found"]["padded rows"]
