"""Scripts become lines as bash reads them, and every line gets the column that its problems' reasons say."""

import pytest

from hrl.errors import Problem, Reason
from tests.verl_lines.classify import ACCEPTED, SENSELESS, column, lines_of, main
from tests.verl_lines.expand import commands_of

ARRAYS = r"""
set -xeuo pipefail
BACKEND=${BACKEND:-vllm}
tp=$((2 * 2))
pip install something
[ -n "$(python3 -c 'import torch_npu' 2>/dev/null && echo yes)" ] && tp=99
COMMON=(data.train_files="['$HOME/a b.parquet', 'b.parquet']" data.train_batch_size=64)
if [ "$BACKEND" = vllm ]; then
    COMMON+=(actor_rollout_ref.rollout.tensor_model_parallel_size=$tp)
fi
ray start --head
PYTHONUNBUFFERED=1 uv run python3 -m verl.trainer.main_ppo \
    "${COMMON[@]}" \
    actor_rollout_ref.rollout.name=$BACKEND trainer.n_gpus_per_node=8 "$@" 2>&1 | tee run.log
"""


def test_a_script_is_read_as_bash_reads_it(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(ARRAYS)
    (call,) = [call for call in commands_of(script, tmp_path, {}) if "-m" in call]
    assert call[:4] == ["uv", "run", "python3", "-m"]
    assert call[4:] == [
        "verl.trainer.main_ppo",
        "data.train_files=['/home/user/a b.parquet', 'b.parquet']",
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=8",
    ]
    (call,) = [call for call in commands_of(script, tmp_path, {"BACKEND": "sglang"}, ["x=1"]) if "-m" in call]
    assert call[-3:] == ["actor_rollout_ref.rollout.name=sglang", "trainer.n_gpus_per_node=8", "x=1"]


def test_programs_are_not_run(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"mkdir {tmp_path}/made\ntouch {tmp_path}/touched\ncd /\npython3 -m a.b c=$(pwd)\n")
    assert commands_of(script, tmp_path, {})[-1] == ["python3", "-m", "a.b", f"c={tmp_path}"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_what_is_said_into_a_pipe_stops_nobody(tmp_path):
    script = tmp_path / "run.sh"
    noise = "for i in $(seq 2000); do echo 'a long line of output, as set -x writes it'; done"
    script.write_text(f"set -euo pipefail\n{{ {noise}; python3 -m a.b; }} 2>&1 | tee run.log\n")
    assert ["python3", "-m", "a.b"] in commands_of(script, tmp_path, {})


def test_a_script_that_waits_for_ever_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.verl_lines.expand.DEADLINE_S", 0.5)
    script = tmp_path / "run.sh"
    script.write_text("python3 -m a.b\nwhile true; do :; done\n")
    assert commands_of(script, tmp_path, {}) == [["python3", "-m", "a.b"]]


def test_a_script_that_asks_for_arguments_gets_some(tmp_path):
    (tmp_path / "run.sh").write_text('[ $# -lt 2 ] && exit 1\ntorchrun -m verl.trainer.sft_trainer to="$2"\n')
    (line,) = lines_of(tmp_path, {})
    assert line.program == "verl.trainer.sft_trainer" and line.arguments == ("to=/home/user/run",)


def test_a_line_has_the_processes_that_its_launcher_starts(tmp_path):
    launcher = "torchrun --standalone --nnodes=1 --nproc_per_node=${1:-8}"
    (tmp_path / "run.sh").write_text(f"{launcher} -m verl.trainer.sft_trainer engine.fsdp_size=2\n")
    (line,) = lines_of(tmp_path, {})
    assert line.arguments == ("trainer.n_gpus_per_node=8", "engine.fsdp_size=2")


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], ACCEPTED),
        ([Reason.ALTERNATIVE], "alternative"),
        ([Reason.ALTERNATIVE, Reason.ABSENT], "feature absent"),
        ([Reason.ABSENT, None], SENSELESS),
        ([Reason.UNREADABLE, Reason.ABSENT], "unreadable"),
    ],
)
def test_the_worst_problem_decides(reasons, expected):
    assert column([Problem("key", "is wrong.", "Do this.", reason=reason) for reason in reasons]) == expected


def test_a_reason_without_a_way_out_is_senseless():
    assert column([Problem("key", "is wrong.", reason=Reason.ABSENT)]) == SENSELESS


LINES = {
    "accepted": "trainer.balance_batch=False data.dataloader_num_workers=0",
    "alternative": "trainer.del_local_ckpt_after_load=true",
    "absent": "trainer.device=npu",
    "unreadable": "trainer.nnodes=",
}


def test_a_folder_is_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, line in LINES.items():
        (tmp_path / f"{name}.sh").write_text(f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {line}\n")
    (tmp_path / "other.sh").write_text("python3 -m recipe.mine.main x=1\n")
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FSDP: 4 lines: 1 accepted, 1 alternative, 1 feature absent, 1 unreadable, 0 senseless" in text
    assert "lines of 1 other programs, not judged: 1" in text

    (tmp_path / "senseless.sh").write_text("python3 -m verl.trainer.main_ppo data.train_files=a.parquet zzz=1\n")
    assert main([str(tmp_path), "--each"]) == 1
    text = capsys.readouterr().out
    assert "[senseless] zzz is not a key of hrl." in text
