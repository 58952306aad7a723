"""`hrl rehearse`: what it says of lines that can't work, how it follows a run, and one line rehearsed for real."""

import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from hrl import cli
from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.models.source import resolve_model
from hrl.rehearse.child import Child, StuckError
from hrl.rehearse.follow import _LAST_OF_THE_START, Follower
from hrl.rehearse.parts import Rehearsal
from hrl.rehearse.prepare import look_at_all_rows
from hrl.rehearse.show import as_data, lines
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.rehearse.sizes import ROOT, cache_in, rehearsed
from tests.rehearse.talker import EVENTS

ADDITION = ("data.train_files=bundled:addition/train", "data.train_batch_size=8")


@pytest.fixture
def quiet_tmp(tmp_path, monkeypatch):
    """A folder for temporary files of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------------------------------------- lines that can't work


def test_a_wrong_key_is_told_as_check_tells_it(capsys, quiet_tmp):
    assert cli.main(["rehearse", "grpo", "trainer.n_gpu_per_node=8", *ADDITION]) == 2
    assert "Did you mean trainer.n_gpus_per_node?" in capsys.readouterr().err
    assert list(quiet_tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["actor_rollout_ref.model.path=/cluster/models/Qwen2.5-7B"], "add actor_rollout_ref.model.path=… to the line"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=8"], "does not divide the 9 attention heads"),
        (["data.train_batch_size=1024"], "65 kept, 1024 needed"),
        (["data.train_files=missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_can_not_work_is_told_in_one_piece_and_nothing_is_started(keys, said, capsys, quiet_tmp):
    line = [*["python", "-m", "hrl.trainer.main_ppo", "trainer.n_gpus_per_node=8"], *ADDITION, *keys]
    assert cli.main(["rehearse", *line]) == 2
    written = " ".join(capsys.readouterr().out.split())
    assert said in written
    assert "Not rehearsed" not in written and "passed" not in written
    assert list(quiet_tmp.iterdir()) == []


def test_a_bad_row_is_named(capsys, quiet_tmp, tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows") / "train.jsonl"
    good = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(16)]
    rows.write_text("\n".join([*good[:5], '{"prompt": "What is 5 + 1?", "answ', *good[5:]]))
    assert cli.main(["rehearse", "grpo", f"data.train_files={rows}", "data.train_batch_size=8"]) == 2
    assert f"{rows} line 6: is not JSON" in " ".join(capsys.readouterr().out.split())


def test_a_batch_that_nobody_chose_is_the_lines_own(tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(f"{json.dumps({'prompt': f'{n} + 1?', 'answer': str(n + 1)})}\n" for n in range(1100)))
    model = f"actor_rollout_ref.model.path={resolve_model('bundled:smollm2-135m-instruct')}"  # a folder, as a twin is
    config, found = compose_kind(PPO, [f"data.train_files={rows}", model]), Rehearsal(lambda what: None)
    look_at_all_rows(config, config, found)
    assert "1,024 of them a step; the run reads 1,024" in found.parts[0].detail


# ---------------------------------------------------------------------------------------------- a run is followed


def talking(how, folder, limit_s=60.0):
    return Child("tests.rehearse.talker", [how], {**os.environ, "PYTHONPATH": str(ROOT)}, folder / "said", limit_s)


def test_a_run_is_followed_part_by_part():
    found = Rehearsal(lambda what: None)
    follower = Follower(found, "start")
    for event in EVENTS:
        follower.take(event)
    assert [part.name for part in found.parts] == ["start", "validation after step 0", "step 1", "step 2"]
    details = [part.detail for part in found.parts]
    assert "starting Ray 2.0 s, loading actor 3.0 s" in details[0]
    assert details[1:3] == ["val/sums/mean@1 0.25", "gen 1.0 s"]
    assert follower.steps == [1, 2] and follower.phase == "step 3"


def test_the_stages_that_end_the_start_are_the_trainers():
    assert set(_LAST_OF_THE_START) == {TrainingLoop.beginning, RayPPOTrainer.beginning}


def test_an_error_in_a_step_is_the_steps_whatever_is_done_after_it():
    follower = Follower(Rehearsal(lambda what: None), "start")
    for event in EVENTS[:10]:
        follower.take(event)
    assert follower.phase == "the first step"
    for title in ("ending the processes", "writing the report"):
        follower.take({"event": "stage", "title": title})
        follower.take({"event": "stage", "title": title, "seconds": 1.0})
    assert follower.phase == "the first step"


def test_a_run_that_ends_early_is_told_with_its_phase_and_its_last_words(tmp_path):
    found = Rehearsal(lambda what: None)
    follower, child = Follower(found, "start"), talking("fails", tmp_path)
    for event in child.events():
        if event is not None:
            follower.take(event)
    assert child.wait() == 3
    follower.failed(child, "the run ended with status 3")
    (part,) = found.parts
    assert not part.passed and part.name == "start: starting Ray"
    assert part.detail.splitlines() == [
        "the run ended with status 3",
        '{"event": "step", "of": "the reward"}',  # of the user's code, and like none of a run
        "a print of the reward",
        "SomeError: the port is taken",
    ]
    assert found.status == 1
    found.has_run = True
    assert as_data(found)["passed"] is False
    assert str(lines(found)[-1]).startswith("failed: start: starting Ray")


def test_a_run_that_takes_too_long_is_stuck_and_all_of_it_can_be_seen(tmp_path):
    child = talking("waits", tmp_path, limit_s=20.0)
    try:
        for event in child.events():
            if event is not None and event.get("step") == 2:
                break
        deadline = time.monotonic() + 15
        while len(child.family()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        family = child.family()
        assert len(family) == 2
        child._deadline = 0.0
        with pytest.raises(StuckError, match="--timeout"):
            list(child.events())
    finally:
        child.end()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    psutil.wait_procs(family, timeout=10)


# ---------------------------------------------------------------------------------------------- for real


def files_in(folder):
    """What is in a folder for temporary files, but for what torch keeps there for the next process."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def left_of(folder):
    """The processes whose command names a folder."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]


@pytest.fixture
def short_tmp():
    """A folder with a short path, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.cluster
def test_a_line_for_eight_cards_is_rehearsed_from_its_models_description(tmp_path, short_tmp, monkeypatch):
    temporary, files = short_tmp, tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    home = cache_in(tmp_path / "home")
    # For SGLang transformers samples: vLLM's start takes as long as all else.
    keys = ("actor_rollout_ref.rollout.name=sglang", "trainer.pool_options={global: {nodes: [big]}}")
    done = rehearsed("7b_8x80gb", home, files, ["--json"], keys)
    said = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["part"]: part["detail"] for part in said["rehearsed"]}
    assert "qwen2, 2 of 28 layers" in parts["tiny models"] and "the same 152,064 tokens" in parts["tiny models"]
    assert "1,600 rows" in parts["rows"] and "512 of them a step" in parts["rows"]
    assert {"start", "step 1", "step 2", "checkpoint", "SIGKILL of the driver", "start again", "step 3"} <= parts.keys()
    assert "resumed after step 2" in parts["resume"]
    assert {"what": "processes", "was": "8", "now": "2 on this one"} in said["reduced"]
    assert {"what": "actor_rollout_ref.rollout.name", "was": "sglang", "now": "hf"} in said["reduced"]
    absent = {each["what"] for each in said["not_rehearsed"]}
    assert {"trainer.pool_options.global.nodes=[big]", "SGLang's engines"} <= absent
    assert files_in(temporary) == [] and left_of(temporary) == []
    left = {path.name for path in files.iterdir()} - {"__pycache__"}  # which Python leaves beside what it imports
    assert sorted(left) == ["held_out.jsonl", "sums.py", "train.jsonl"]
    assert not list(home.rglob("*.safetensors"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_everything_and_leaves_nothing(number, quiet_tmp, monkeypatch, capsys):
    children = []

    def start(program, folder, environ, options, name):
        environ = {**environ, "PYTHONPATH": str(ROOT)}
        children.append(Child("tests.rehearse.talker", ["waits"], environ, folder / "said", 60.0))
        return children[-1]

    def interrupted(self, event):
        if event.get("step") == 2:  # it has a child of its own by then, or soon
            families.append(children[-1].family())
            signal.raise_signal(number)

    families = []
    monkeypatch.setattr("hrl.rehearse.rehearsal._start", start)
    monkeypatch.setattr(Follower, "take", interrupted)
    handler = signal.getsignal(number)
    assert cli.main(["rehearse", "sft", "data.train_batch_size=16"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert files_in(quiet_tmp) == [] and left_of(quiet_tmp) == []
    assert families and not psutil.wait_procs(families[0], timeout=5)[1]
    assert signal.getsignal(number) is handler
