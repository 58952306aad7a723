"""The configurations of the offline trainers: composed and checked as PPO's, with rules of their own."""

import subprocess
import sys

import pytest

from hrl import cli
from hrl.config import ConfigError
from hrl.config.arithmetic import batch_arithmetic
from hrl.config.compose import compose_kind
from hrl.config.help import run_help
from hrl.config.load import load_kind, validate_kind
from hrl.config.run_kind import DPO, OFFLINE_KINDS, RM, SFT
from hrl.config.section import leaves, sections

EVERY_KIND = pytest.mark.parametrize("kind", OFFLINE_KINDS.values(), ids=OFFLINE_KINDS)


def problems(kind, **given):
    with pytest.raises(ConfigError) as caught:
        validate_kind(kind, {key.replace("__", "."): value for key, value in given.items()})
    return [str(problem) for problem in caught.value.problems]


@EVERY_KIND
def test_no_argument_is_the_quickstart(kind):
    config = compose_kind(kind, [])
    assert config.model.path == "bundled:smollm2-135m-instruct"
    assert config.data.train_files[0].startswith("bundled:addition_")
    assert config.trainer.default_local_dir == f"outputs/hrl/{kind.name}_quickstart"
    assert config.trainer.save_freq > 0  # what was learnt is written


@EVERY_KIND
def test_an_untouched_schema_is_what_an_empty_tree_loads(kind):
    assert load_kind(kind, {}) == kind.schema()


@EVERY_KIND
def test_every_key_has_a_sentence_and_every_table_names_keys_that_exist(kind):
    known = leaves(kind.schema)
    assert [key for key, leaf in known.items() if not leaf.help.endswith(".")] == []
    assert [key for key, leaf in known.items() if ("Default: " in leaf.help) != (leaf.derive is not None)] == []
    assert [key for key in kind.help.most_used if key not in known] == []
    for table in (kind.spellings.outside, kind.spellings.renamed):
        assert [key for key in table if key in known] == []


def test_every_renaming_ends_at_a_key_of_some_trainer():
    for kind in OFFLINE_KINDS.values():
        for new in kind.spellings.renamed.values():
            target = new.removesuffix(".*")
            assert any(target in leaves(k.schema) or target in sections(k.schema) for k in OFFLINE_KINDS.values()), new


@EVERY_KIND
def test_help_names_the_program_and_the_file(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        compose_kind(kind, ["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert text == run_help(kind=kind) + "\n"
    assert f"usage: python -m hrl.trainer.main_{kind.name} [key=value ...]" in text
    assert f"{kind.name}_trainer" in text and f"hrl check {kind.name} " in text and "recipe" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_wrong_keys_come_at_once_with_the_right_names():
    assert problems(DPO, algorithm__bta=0.1, trainer__total_epoch=3, actor_rollout_ref__model__path="m") == [
        "algorithm.bta is not a key of hrl. Did you mean algorithm.beta?",
        "trainer.total_epoch is not a key of hrl. Did you mean trainer.total_epochs?",
        "actor_rollout_ref.model.path is not a key of hrl. Did you mean model.path?",
    ]
    (problem,) = problems(SFT, zzz=1)
    assert "docs/configuration-offline.md, or `hrl check sft --help`" in problem


def test_keys_of_verls_sft_trainer_are_understood():
    given = {"model.partial_pretrain": "m", "optim.lr_scheduler": "cosine", "data.multiturn.messages_key": "chat"}
    config = validate_kind(SFT, given)
    assert (config.model.path, config.optim.lr_scheduler_type, config.data.messages_key) == ("m", "cosine", "chat")
    assert validate_kind(SFT, {"model.lora.rank": 8}).model.lora_rank == 8
    assert "an adapter has no dropout" in problems(SFT, model__lora_dropout=0.1)[0]
    assert "set data.max_length" in problems(DPO, data__max_prompt_length=8)[0]


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (
            DPO,
            {"data__max_length": 100, "data__max_token_len_per_gpu": 199},
            "data.max_token_len_per_gpu is 199 tokens, but the two answers of a pair may have 2 × 100. "
            "Set it to at least 200.",
        ),
        (
            SFT,
            {"data__max_length": 100, "data__max_token_len_per_gpu": 99},
            "data.max_token_len_per_gpu is 99 tokens, but one row may have 100. Set it to at least 100.",
        ),
        (
            DPO,
            {"algorithm__loss_type": "ipo", "algorithm__label_smoothing": 0.1},
            "algorithm.label_smoothing is 0.1, which the loss ipo does not read. "
            "Set it to 0, or take one of sigmoid, simpo, orpo.",
        ),
        (
            DPO,
            {"algorithm__loss_type": "sigmoyd", "algorithm__label_smoothing": 0.1},
            "algorithm.loss_type names 'sigmoyd', which nothing is registered under. Did you mean sigmoid?",
        ),
        (
            DPO,
            {"algorithm__desirable_weight": 2.0},
            "algorithm.desirable_weight is 2.0, which the loss sigmoid does not read. Set it to 1, or take kto or "
            "apo_zero_unpaired, whose rows are single answers with a label.",
        ),
        (
            DPO,
            {"algorithm__loss_type": "kto", "algorithm__reference_free": True},
            "algorithm.reference_free is true, and the loss kto compares every answer with the reference. "
            "Set it to false.",
        ),
        (
            DPO,
            {"algorithm__loss_type": "kto", "data__train_batch_size": 1},
            "data.train_batch_size is 1, and the loss kto reads each prompt with the answer to another one of its "
            "batch. Set it to at least 2.",
        ),
        (
            DPO,
            {"algorithm__target_margin": 1.0},
            "algorithm.target_margin is 1.0, which the loss sigmoid does not read. Set it to 0, or take simpo.",
        ),
        (
            RM,
            {"model__fsdp_config__fsdp_size": 2, "trainer__n_gpus_per_node": 3},
            "model.fsdp_config.fsdp_size is 2, which does not divide the 3 processes. Set it to -1 for all of them.",
        ),
        (
            RM,
            {"ulysses_sequence_parallel_size": 2, "trainer__n_gpus_per_node": 3},
            "model.fsdp_config.ulysses_sequence_parallel_size is 2, which does not divide the 3 processes. "
            "Nearest that do: 1 and 3; or start a multiple of 2 processes (trainer.n_gpus_per_node).",
        ),
        (
            DPO,
            {
                "ulysses_sequence_parallel_size": 2,
                "trainer__n_gpus_per_node": 2,
                "data__max_length": 1000,
                "data__max_token_len_per_gpu": 999,
            },
            "data.max_token_len_per_gpu is 999 tokens on each of 2 processes, but the two answers of a pair may have "
            "2 × 1000. Set it to at least 1000.",
        ),
        (
            RM,
            {"model__fsdp_config__dtype": "float16"},
            "model.fsdp_config.dtype is float16, in which small gradients become zero: the loss isn't scaled. "
            "Set it to bfloat16.",
        ),
        (
            SFT,
            {"checkpoint__save_contents": ["extra", "hf_model"], "checkpoint__load_contents": ["model"]},
            "checkpoint.save_contents is [extra,hf_model], from which no run can continue. "
            "Add model, or set trainer.save_freq=-1.",
        ),
        (
            SFT,
            {"data__val_files": [], "trainer__val_before_train": True},
            "trainer.val_before_train is true, but data.val_files is empty. Name validation rows, or set it to false.",
        ),
        (SFT, {"trainer__logger": "wadb"}, "trainer.logger names 'wadb', which nothing is registered under. "
            "Did you mean wandb?"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(kind, given, sentence):
    assert problems(kind, **given) == [sentence]


def test_a_fixed_number_of_rows_needs_no_token_budget():
    config = validate_kind(DPO, {"data.micro_batch_size_per_gpu": 2, "data.max_length": 10**6})
    facts = dict(batch_arithmetic(config, train_rows=130))
    assert facts["micro-batch"] == "2 pairs per process (at most 4,000,000 tokens)"
    assert facts["run"] == "130 rows ÷ 64 = 2 steps an epoch, 2 left over, × 1 epoch = 2 steps"
    assert facts["one step"].startswith("64 pairs = 128 answers")


@pytest.mark.parametrize(
    ("loss", "free", "needs"), [("sigmoid", False, True), ("ipo", True, False), ("simpo", False, False)]
)
def test_a_reference_is_built_where_the_loss_reads_it(loss, free, needs):
    config = validate_kind(DPO, {"algorithm.loss_type": loss, "algorithm.reference_free": free})
    assert config.needs_reference is needs
    assert ("reference" in dict(batch_arithmetic(config))) is needs


def test_every_registered_loss_of_pairs_is_accepted_one_of_the_user_too(monkeypatch):
    from hrl.algos import preference

    monkeypatch.setitem(preference.PAIR_LOSSES, "linear", lambda chosen, rejected, options: rejected - chosen)
    configs = {name: validate_kind(DPO, {"algorithm.loss_type": name}) for name in preference.PAIR_LOSSES}
    assert {name for name in configs if not configs[name].needs_reference} == {"simpo", "orpo"}
    constants = {"algorithm.label_smoothing": 0.1, "algorithm.target_margin": 0.5}
    assert validate_kind(DPO, {"algorithm.loss_type": "linear", **constants}).algorithm.target_margin == 0.5


@EVERY_KIND
def test_check_says_what_a_run_would_do(kind, capsys):
    assert cli.main(["check", kind.name, "trainer.nnodes=2"]) == 0
    text = capsys.readouterr().out
    assert "2 processes (1 on each of 2 machines)" in text and "one optimizer step" in text
    assert cli.main(["check", kind.name, "trainer.sed=2"]) == 2
    assert "Did you mean trainer.seed?" in capsys.readouterr().err


def test_composing_imports_neither_torch_nor_ray():
    code = (
        "import sys; from hrl.cli import main; main(['check', 'dpo', '--config-only', '--json']); "
        "sys.exit(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)) != [])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=600, check=False)
    assert done.returncode == 0
