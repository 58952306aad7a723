"""The ledger's sums, against torch's own tracker on tensors without storage and against arithmetic by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.run_kind import OFFLINE_KINDS, PPO
from hrl.models.footprint import Footprint
from hrl.preflight import memory_ledger as ledgers
from hrl.preflight.memory_ledger import (
    GIB,
    Entry,
    Ledger,
    MemoryPhase,
    engine_too_small,
    ledgers_of,
    perhaps_too_large,
    too_large,
)
from hrl.preflight.memory_savings import savings
from hrl.workers.engine.adafactor import Adafactor
from hrl.workers.engine.adamw_8bit import AT_ONCE, AdamW8bit
from hrl.workers.engine.muon import Muon
from hrl.workers.engine.update_rule import BUCKET_ELEMENTS
from tests.plan.models import SEVEN as SEVEN_CONFIG
from tests.processes.warm import warm_context
from tests.workers.engine.fake_device import FakeDevice

# Real widths, on which it depends what dominates, and few layers, of which each adds the same.
FEW = {"num_hidden_layers": 2}
CASES = {
    "activations and weights kept": (SEVEN_CONFIG | FEW, 8, 8192, False, False),
    "head and embedding shared": (SEVEN_CONFIG | FEW | {"tie_word_embeddings": True}, 2, 4096),
    "adapter": (SEVEN_CONFIG | FEW, 1, 8192, True, True, 32),
}
# Qwen2.5-7B at 16-bit products: the counts of its config, its activations as `footprint` finds them.
SEVEN = Footprint(
    7615616512, 544997376, 544997376, 233057792, 28, 3584, 152064, 200_000, 7168, 240_000, 14336, 57344, 4
)
CARD = 80e9


def tracked_and_said(arguments):
    from tests.preflight.tracked_step import Case, said_of, tracked_step

    case = Case(*arguments)
    size, peaks = tracked_step(case)
    return peaks, said_of(case, size)


@pytest.fixture(scope="module")
def tracked():
    with warm_context().Pool(1) as process:  # not here: a step changes modules
        found = process.map_async(tracked_and_said, CASES.values(), chunksize=1).get(240)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.cluster
@pytest.mark.parametrize("name", CASES)
def test_every_phase_takes_what_the_ledger_says(tracked, name):
    peaks, said = tracked[name]
    assert {phase: said[phase] / peak for phase, peak in peaks.items()} == {
        phase: pytest.approx(1.0, abs=0.1) for phase in peaks
    }


def config(*overrides):
    given = compose_kind(PPO, ["data.max_prompt_length=1024", "data.max_response_length=3072", *overrides])
    return with_dtypes(given, "cuda")


def cards(given, size, capacity=CARD):
    """The ledgers of a run's GPUs."""
    return [ledger for ledger in ledgers_of(given, {"actor": size}, "cuda", capacity) if not ledger.is_host]


ONE_CARD = (
    "trainer.device=cuda",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
)
OFFLOADED = (
    *ONE_CARD,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
)


def test_seven_billion_parameters_fit_one_card_with_offload_and_not_without():
    (plain,) = cards(config(*ONE_CARD), SEVEN)
    (offloaded,) = cards(config(*OFFLOADED), SEVEN)
    assert "moments 56.7" in too_large(plain, CARD)
    assert offloaded.peak.num_bytes < CARD
    phases = {phase.name: phase for phase in offloaded.phases}
    generation = {entry.label: entry.num_bytes for entry in phases["generation"].entries}
    assert generation.keys() == {"engine", "CUDA"}
    assert generation["engine"] == 0.5 * CARD
    sync = {entry.label for entry in phases["weight sync"].entries}
    assert {"engine weights", "buffers", "a whole tensor"} < sync
    assert not sync & {"actor weights", "actor moments", "engine"}  # offloaded, and the cache still asleep


def test_a_shard_is_the_whole_divided_by_the_processes():
    shares = {}
    for count in (1, 8):
        given = config(*ONE_CARD, f"trainer.n_gpus_per_node={count}", "data.train_batch_size=8")
        (ledger,) = cards(given, SEVEN)
        update = next(phase for phase in ledger.phases if phase.name == "actor backward")
        shares[count] = {entry.label: entry.num_bytes for entry in update.entries}
    for label in ("actor weights", "actor moments", "actor gradients"):
        assert shares[1][label] == 8 * shares[8][label]
    assert shares[1]["actor moments"] == 8 * SEVEN.parameters


def test_a_teacher_is_counted_by_its_own_size_and_lies_beside_the_policy():
    given = config(*ONE_CARD, "recipe=distillation", "trainer.n_gpus_per_node=1", "data.train_batch_size=8")
    teacher = replace(SEVEN, parameters=2 * SEVEN.parameters)
    ledger = next(ledger for ledger in ledgers_of(given, {"actor": SEVEN, "ref": teacher}, "cuda", CARD))
    phases = {phase.name: {entry.label: entry.num_bytes for entry in phase.entries} for phase in ledger.phases}
    assert phases["reference"]["ref weights"] == 2 * 2 * SEVEN.parameters  # in bfloat16
    assert phases["actor backward"]["ref weights"] == phases["reference"]["ref weights"]


def test_a_sequence_group_divides_activations_and_not_weights():
    found, models = {}, {}
    for degree in (1, 4):
        given = config(
            *ONE_CARD,
            "trainer.n_gpus_per_node=8",
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={degree}",
            # One budget for the group, or a prompt's two samples where these are fewer: 1024 + 2 * 3072 tokens.
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={8192 // degree}",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=2",
        )
        (ledger,) = cards(given, SEVEN)
        update = next(phase for phase in ledger.phases if phase.name == "actor backward")
        found[degree] = {entry.label: entry.num_bytes for entry in update.entries}
        (models[degree],) = ledgers._pools(given, {"actor": SEVEN}, "cuda")[0].models
    assert found[1]["actor weights"] == found[4]["actor weights"]
    tokens = {1: 1024 + 2 * 3072, 4: 8192 // 4}
    assert {degree: model.tokens for degree, model in models.items()} == tokens
    assert models[4]._layer == SEVEN.kept_bytes_per_token * tokens[4]


def test_weights_that_stay_gathered_between_forward_and_backward_are_counted():
    gathered = {}
    for reshards in ("true", "false"):
        key = f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={reshards}"
        given = config(*ONE_CARD, "trainer.n_gpus_per_node=8", "data.train_batch_size=8", key)
        (ledger,) = cards(given, SEVEN)
        forward = next(phase for phase in ledger.phases if phase.name == "actor forward")
        gathered[reshards] = {entry.label: entry.num_bytes for entry in forward.entries}["actor gathered weights"]
    # The head and the buffer through which it came; and all weights, and that buffer.
    assert gathered == {"true": 2 * 2 * 544997376, "false": 2 * (SEVEN.parameters + 544997376)}


def test_the_rows_of_episodes_fill_every_micro_batch():
    """How many there are is known when they are over; two samples of one prompt have 1024 + 2 * 3072 tokens."""
    few = ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    peaks = []
    for more in (few, (), (*few, "environment.path=guess")):
        given = config(*ONE_CARD, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=28672", *more)
        (ledger,) = cards(given, SEVEN)
        peaks.append(next(phase for phase in ledger.phases if phase.name == "actor backward").num_bytes)
    assert peaks[0] < peaks[1] == peaks[2]


def test_gradients_of_one_micro_batch_and_what_its_layers_keep_do_not_peak_together():
    one = ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    found = {}
    for several, more in ((True, ()), (False, one)):
        (ledger,) = cards(config(*OFFLOADED, *more), SEVEN)
        backward = next(phase for phase in ledger.phases if phase.name == "actor backward")
        found[several] = {entry.label: entry.num_bytes for entry in backward.entries}
    assert found[True]["actor gradients"] == 4 * SEVEN.parameters
    # The embedding's, which comes last, is on its way.
    assert found[False]["actor gradients"] == 4 * (SEVEN.parameters - 544997376)
    assert found[True]["actor activations"] > found[False]["actor activations"]


def test_a_model_that_only_scores_has_no_moments():
    (ledger,) = cards(config(*ONE_CARD, "actor_rollout_ref.actor.use_kl_loss=true"), SEVEN)
    phases = {phase.name: phase.entries for phase in ledger.phases}
    assert [*phases] == [
        "actor loads",
        "ref loads",
        "engine start",
        "generation",
        "log-probs",
        "actor forward",
        "actor backward",
        "actor optimizer",
        "reference",
        "weight sync",
    ]
    assert sum(entry.num_bytes for entry in phases["reference"] if entry.label == "ref moments") == 0


def test_an_engine_of_its_own_has_a_card_to_itself():
    given = config(*ONE_CARD, "placement=separate", "algorithm.adv_estimator=grpo")
    where = {ledger.where: ledger for ledger in cards(given, SEVEN)}
    rollout = next(ledger for name, ledger in where.items() if "rollout" in name)
    assert [phase.name for phase in rollout.phases] == ["engine start", "generation", "weight sync"]
    sync = {entry.label: entry.num_bytes for entry in rollout.phases[2].entries}
    # Beside the share: one bucket, the embedding put together (545e6 weights of 2 bytes), and its layer once more.
    assert sync["buffers"] == given.actor_rollout_ref.rollout.weight_sync.bucket_mb * 2**20
    assert sync["a tensor and its layer as they load"] == 2 * 2 * 544997376
    assert sync["engine"] == given.actor_rollout_ref.rollout.gpu_memory_utilization * CARD
    (actor,) = [ledger for name, ledger in where.items() if "rollout" not in name and "ref" not in name]
    assert not [entry for phase in actor.phases for entry in phase.entries if "engine" in entry.label]


def test_a_share_that_holds_no_sequence_is_told():
    said = ledgers.engine_too_small(0.2 * CARD, config(*ONE_CARD), SEVEN)
    assert "gives the engine 14.9 GiB of each GPU, but its weights take 14.2" in said
    assert ledgers.engine_too_small(0.5 * CARD, config(*ONE_CARD), SEVEN) is None


def test_the_quickstart_needs_about_what_was_measured_on_a_cpu():
    size = Footprint(134515008, 28311552, 0, 3540096, 30, 576, 49152, 20_268, 1152, 22_572, 2304, 23040, 3)
    quickstart = with_dtypes(
        compose_kind(
            PPO, ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
        ),
        "cpu",
    )
    (ledger,) = ledgers_of(quickstart, {"actor": size}, "cpu", None)
    assert 1.0 <= ledger.peak.num_bytes / (9.8 * GIB) <= 1.4  # docs/status.md: 9.8 GiB


def test_an_offline_run_has_no_engine():
    given = compose_kind(OFFLINE_KINDS["dpo"], ["trainer.device=cuda"])
    (ledger,) = cards(with_dtypes(given, "cuda"), SEVEN)
    phases = ["reference", "model forward", "model backward", "model optimizer"]
    assert [phase.name for phase in ledger.phases] == ["model loads", *phases, "checkpoint"]
    assert (ledger.where, ledger.peak.name) == ("each GPU", "model backward")
    (machine,) = ledgers_of(with_dtypes(given, "cpu"), {"actor": SEVEN}, "cpu", None)
    assert [phase.name for phase in machine.phases] == phases


def test_words_name_phase_and_parts_the_largest_first():
    ledger = Ledger(
        "each GPU", (MemoryPhase("a", (Entry("x", GIB), Entry("y", 2 * GIB))), MemoryPhase("b", (Entry("z", GIB),)))
    )
    assert too_large(ledger, 3 * GIB) is None
    assert too_large(ledger, 2 * GIB) == "each GPU has 2.0 GiB, and the phase 'a' takes at least 3.0 GiB: y 2.0, x 1.0"


def test_what_is_only_an_estimate_is_no_reason_to_refuse():
    ledger = Ledger("each GPU", (MemoryPhase("a", (Entry("x", GIB), Entry("y", 2 * GIB, certain=False))),))
    assert too_large(ledger, 2 * GIB) is None
    assert (
        perhaps_too_large(ledger, 2 * GIB) == "each GPU has 2.0 GiB, and the phase 'a' may take 3.0 GiB: y 2.0, x 1.0"
    )
    assert perhaps_too_large(ledger, 0.5 * GIB) is None  # that is told as an error


@pytest.mark.parametrize(("save_freq", "copies"), [(-1, 0), (5, 12 * SEVEN.parameters)])
def test_an_update_may_find_a_checkpoint_that_is_not_written_yet(save_freq: int, copies: int) -> None:
    given = compose_kind(
        PPO, [f"trainer.save_freq={save_freq}", "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32"]
    )
    (machine,) = ledgers_of(with_dtypes(given, "cpu"), {"actor": SEVEN}, "cpu", None)
    update = next(phase for phase in machine.phases if phase.name == "actor backward")
    found = [entry for entry in update.entries if entry.label == "actor checkpoint being written"]
    assert sum(entry.num_bytes for entry in found) == copies
    assert not any(entry.certain for entry in found)


ADAPTED = replace(SEVEN, adapter=40_370_176, adapted_layers=196)
WITH_ADAPTER = (*ONE_CARD, "actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.use_kl_loss=true")


def test_an_adapter_has_gradients_and_moments_and_its_model_neither():
    (ledger,) = cards(config(*WITH_ADAPTER), ADAPTED)
    phases = {phase.name: phase.entries for phase in ledger.phases}
    assert not [name for name in phases if "ref" in name], "it is the actor without its adapter"
    update = {entry.label: entry.num_bytes for entry in phases["actor backward"]}
    assert update["actor weights"] == 2 * ADAPTED.parameters + 4 * ADAPTED.adapter
    assert update["actor moments"] == 8 * ADAPTED.adapter
    assert update["actor gradients"] == 4 * ADAPTED.adapter
    (full,) = cards(config(*ONE_CARD, WITH_ADAPTER[-1]), SEVEN)
    assert "reference" in {phase.name for phase in full.phases}


def test_weights_in_4_bits_are_counted_as_such_and_are_read_in_full():
    in_4_bits = replace(ADAPTED, in_4_bits=6_000_000_000)
    card, host = ledgers_of(config(*WITH_ADAPTER), {"actor": in_4_bits}, "cuda", CARD)
    rest = ADAPTED.parameters - 6_000_000_000
    held = 2 * rest + 6_000_000_000 * 17 / 32 + 4 * ADAPTED.adapter
    assert phase_of(card, "actor backward")["actor weights"] == pytest.approx(held)
    read = phase_of(host, "model loads")["actor as rank 0 loads it"]
    assert read == 2 * ADAPTED.parameters + 4 * ADAPTED.adapter
    for way in ("param_offload", "offload_policy"):
        keys = (*WITH_ADAPTER, f"actor_rollout_ref.actor.fsdp_config.{way}=true")
        card, host = ledgers_of(config(*keys), {"actor": in_4_bits}, "cuda", CARD)
        assert phase_of(host, "training")["actor weights"] == pytest.approx(held)
        assert "actor weights" not in phase_of(card, "weight sync")


def test_an_engine_keeps_two_copies_of_an_adapter_that_is_sent_alone_also_while_it_sleeps():
    (card,) = cards(config(*WITH_ADAPTER), ADAPTED)
    held = {phase.name: {entry.label: entry.num_bytes for entry in phase.entries} for phase in card.phases}
    label = "engine's copies of the adapter"
    assert {name for name, entries in held.items() if label not in entries} == {"actor loads", "engine start"}
    assert held["actor backward"][label] == 2 * 2 * ADAPTED.adapter
    (merged,) = cards(config(*WITH_ADAPTER, "actor_rollout_ref.model.lora.merge=true"), ADAPTED)
    assert not any(entry.label == label for phase in merged.phases for entry in phase.entries)


def test_of_an_adapter_nothing_else_is_gathered_where_it_goes_alone():
    of_layer = 4 * ADAPTED.adapter / ADAPTED.num_layers
    for merge, sent in (("false", of_layer), ("true", 2 * ADAPTED.embedding)):
        merges = f"actor_rollout_ref.model.lora.merge={merge}"
        card, _ = ledgers_of(config(*WITH_ADAPTER, "trainer.save_freq=1", merges), {"actor": ADAPTED}, "cuda", CARD)
        assert phase_of(card, "weight sync")["a whole tensor"] == sent
        assert phase_of(card, "checkpoint")["a whole tensor"] == of_layer
    folder = (*WITH_ADAPTER, "trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]")
    _, host = ledgers_of(config(*folder), {"actor": ADAPTED}, "cuda", CARD)
    assert phase_of(host, "checkpoint")["actor folder hf"] == 4 * ADAPTED.adapter


def test_an_adapter_of_seven_billion_parameters_fits_a_card_of_24_gb():
    small = (
        *WITH_ADAPTER,
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.85",
        "actor_rollout_ref.rollout.weight_sync.bucket_mb=64",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    )
    card = 24 * 2.0**30
    given = config(*small)
    (ledger,) = cards(given, ADAPTED, card)
    assert too_large(ledger, card) is None and perhaps_too_large(ledger, card) is None, ledger.peak.in_words()
    assert engine_too_small(0.85 * card, given, ADAPTED) is None


def phase_of(ledger, name):
    (phase,) = [phase for phase in ledger.phases if phase.name == name]
    return {entry.label: entry.num_bytes for entry in phase.entries}


@pytest.mark.parametrize(
    ("name", "per_weight"),
    [
        ("adamw", 8.0),
        ("adamw8bit", 2.03),
        ("adafactor", 0.0),
        # Head and embedding are moved by AdamW.
        ("muon", 4 + 4 * 2 * 544997376 / SEVEN.parameters),
    ],
)
def test_what_an_optimizer_keeps_is_counted(name, per_weight):
    (ledger,) = cards(config(*ONE_CARD, f"actor_rollout_ref.actor.optim.name={name}"), SEVEN)
    assert phase_of(ledger, "actor optimizer").get("actor moments", 0.0) == pytest.approx(per_weight * SEVEN.parameters)


SIZED = replace(SEVEN, largest_tensor=544997376, largest_matrix=18944 * 3584, shorter_side=3584)
MATRIX, SQUARE = 67895296, 12845056


@pytest.mark.parametrize(
    ("name", "ranks", "size", "num_bytes"),
    [
        ("adamw", 1, SIZED, 0),
        # The embedding's update in float32, and its squares in float64: more than a bucket of 2^25 weights.
        ("adafactor", 1, SIZED, (4 + 8) * 544997376),
        ("adafactor", 8, SIZED, (4 + 8) * 68124672),
        ("adafactor", 32, SIZED, 4 * 33554432 + 8 * 17031168),
        # Six tensors of 2^23 weights, or of the largest shard.
        ("adamw8bit", 1, SIZED, 192 << 20),
        ("adamw8bit", 8, replace(SIZED, largest_tensor=1 << 20), 6 * 4 * 131072),
        # In bfloat16 the momentum, four copies of it, and two products; over ranks also the rows of others' matrices.
        ("muon", 1, SIZED, 2 * (5 * MATRIX + 2 * SQUARE)),
        ("muon", 8, SIZED, 2 * (6 * MATRIX + 2 * SQUARE)),
        # Momentum, directions and these in one tensor, of this rank's experts.
        ("muon", 8, replace(SIZED, largest_stack=1 << 30), 2 * (4 * MATRIX + 2 * SQUARE + 3 * (1 << 27))),
    ],
)
def test_what_a_step_takes_beside_its_state_is_counted(name, ranks, size, num_bytes):
    keys = (f"actor_rollout_ref.actor.optim.name={name}", f"trainer.n_gpus_per_node={ranks}")
    (card,) = cards(config(*ONE_CARD, "data.train_batch_size=32", *keys), size)
    label = "actor optimizer at work"
    assert phase_of(card, "actor optimizer").get(label, 0) == num_bytes
    assert not any(entry.label == label for phase in card.phases[:-2] for entry in phase.entries)
    if name in ("adafactor", "adamw8bit"):
        keys = (*keys, "actor_rollout_ref.actor.fsdp_config.offload_policy=true")
        card, host = ledgers_of(config(*ONE_CARD, "data.train_batch_size=32", *keys), {"actor": size}, "cuda", CARD)
        assert label not in phase_of(card, "actor optimizer")
        assert phase_of(host, "training")[label] == ranks * num_bytes


@pytest.mark.parametrize("name", ["adafactor", "adamw8bit", "muon"])
def test_a_step_takes_about_what_is_said_of_it(name):
    assert (ledgers._BUCKET, ledgers._AT_ONCE) == (BUCKET_ELEMENTS, AT_ONCE)
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    rows, columns = 768, 2048
    weight = nn.Parameter(torch.randn(rows, columns))
    given = {"weight_decay": 0.1, "device": torch.device("cpu"), "seed": 0}
    betas = {} if name == "adafactor" else {"betas": (0.9, 0.99)}
    matrices = {"matrices": ["0"]} if name == "muon" else {}
    rule = {"adafactor": Adafactor, "adamw8bit": AdamW8bit, "muon": Muon}[name](
        {weight: "0"}, **matrices, **betas, **given
    )
    count = rows * columns
    size = replace(
        SEVEN, parameters=count, largest_tensor=count, largest_matrix=count, shorter_side=rows, embedding=0, head=0
    )
    keys = (f"actor_rollout_ref.actor.optim.name={name}", "trainer.n_gpus_per_node=1")
    ((model,),) = (pool.models for pool in ledgers._pools(config(*ONE_CARD, *keys), {"actor": size}, "cuda"))
    for _ in range(2):  # the first makes what stays
        weight.grad = torch.randn(rows, columns)
        with FakeDevice("cpu") as recorded:
            rule.step(1e-3)
    assert 0.75 <= recorded.peak_bytes / model.at_step <= 1.02


def test_a_model_that_is_offloaded_altogether_leaves_its_layers_at_work():
    given = config(*ONE_CARD, "actor_rollout_ref.actor.fsdp_config.offload_policy=true")
    card, host = ledgers_of(given, {"actor": SEVEN}, "cuda", CARD)
    assert phase_of(card, "generation").keys() == {"engine", "CUDA"}
    backward = phase_of(card, "actor backward")
    assert not backward.keys() & {"actor weights", "actor moments", "actor gradients"}
    assert {"actor gradients being summed", "actor activations"} < backward.keys()
    training = phase_of(host, "training")
    per_weight = {"actor weights": 4, "actor gradients": 4, "actor moments": 8}
    assert {label: training[label] / SEVEN.parameters for label in per_weight} == per_weight


def test_activations_that_leave_the_card_and_layers_that_keep_theirs_are_counted():
    model = "actor_rollout_ref.model"
    stream, layer = SEVEN.stream_bytes_per_token * 8192, SEVEN.kept_bytes_per_token * 8192
    tail = 2 * stream
    expected = {
        (): 28 * stream,
        (f"{model}.enable_activation_offload=true",): 2 * stream,
        (f"{model}.recompute_num_layers=20",): 20 * stream + 8 * layer,
        (f"{model}.recompute_num_layers=20", f"{model}.enable_activation_offload=true"): 2 * layer,
    }
    for keys, kept in expected.items():
        card, host = ledgers_of(config(*ONE_CARD, *keys), {"actor": SEVEN}, "cuda", CARD)
        assert phase_of(card, "actor forward")["actor activations"] == kept + tail
        away = phase_of(host, "training").get("actor activations", 0.0)
        assert (away > 0) == any("offload" in key for key in keys)


def test_the_keys_that_lower_a_peak_are_named_with_what_they_save():
    given = config(*ONE_CARD)

    def ledgers_with(changed):
        return ledgers_of(changed, {"actor": SEVEN}, "cuda", CARD)

    (card, _) = ledgers_with(given)
    found = savings(given, card, ledgers_with, "cuda")
    # What saves as much as moving everything to the host comes first; Adam's moments alone are 8 bytes a weight.
    assert found[0].key.endswith("offload_policy")
    by_key = {saving.key.rpartition(".")[2]: saving.num_bytes for saving in found}
    assert by_key["optimizer_offload"] == pytest.approx(8 * SEVEN.parameters)
    assert len(found) == 3 and sorted(by_key.values(), reverse=True) == list(by_key.values())
    engine_alone = config(*OFFLOADED, "actor_rollout_ref.rollout.gpu_memory_utilization=0.95")
    (card, _) = ledgers_with(engine_alone)
    keys = {saving.key for saving in savings(engine_alone, card, ledgers_with, "cuda")}
    assert keys == {"actor_rollout_ref.rollout.gpu_memory_utilization"}, "nothing else is there while it samples"


@pytest.mark.parametrize("rank", [0, 16])
def test_no_key_is_tried_that_the_rules_refuse_beside_an_adapter(rank):
    given, tried = config(*ONE_CARD, f"actor_rollout_ref.model.lora_rank={rank}"), []

    def ledgers_with(changed):
        tried.append(changed.actor_rollout_ref.actor.fsdp_config.model_dtype)
        return cards(changed, SEVEN)

    savings(given, cards(given, SEVEN)[0], ledgers_with, "cuda")
    assert len(tried) > 3 and ("bf16" in tried) == (rank == 0)


def test_a_tensor_group_divides_what_is_gathered_and_not_what_is_stored():
    keys = ("trainer.n_gpus_per_node=8", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=8")
    by_degree = {}
    for degree in (1, 2):
        given = config(*ONE_CARD, *keys, f"actor_rollout_ref.actor.fsdp_config.tensor_parallel_size={degree}")
        (ledger,) = cards(given, SEVEN)
        by_degree[degree] = phase_of(ledger, "actor backward")
        (model,) = ledgers._pools(given, {"actor": SEVEN}, "cuda")[0].models
        assert model.tokens == 8192, "all processes of a group have all tokens of a micro-batch"
    for stored in ("actor weights", "actor gradients", "actor moments"):
        assert by_degree[1][stored] == by_degree[2][stored]
    for gathered in ("actor gathered weights", "actor gradients being summed"):
        assert by_degree[2][gathered] == by_degree[1][gathered] / 2
    streams, kept = 4 * 7168, SEVEN.kept_bytes_per_token
    saved = 1.45 * 8192 * (kept - streams) / 2
    assert by_degree[1]["actor activations"] - by_degree[2]["actor activations"] == pytest.approx(saved)


def test_shared_out_experts_are_gathered_by_the_ranks_that_have_them_and_their_tokens_travel():
    in_a_layer = 200_000_000
    mixture = replace(SEVEN, experts=28 * in_a_layer, layer_experts=in_a_layer, routed_bytes_per_token=2 * 3584 * 8)
    by_degree = {}
    for degree in (1, 4):
        given = config(*ONE_CARD, "trainer.n_gpus_per_node=8", f"actor_rollout_ref.actor.expert_parallel_size={degree}")
        (ledger,) = cards(given, mixture)
        by_degree[degree] = {phase.name: phase_of(ledger, phase.name) for phase in ledger.phases}
    for phase in ("actor backward", "actor optimizer"):
        for stored in ("actor weights", "actor gradients", "actor moments"):
            assert by_degree[1][phase][stored] == by_degree[4][phase][stored]
    (alone, shared) = (by_degree[degree]["actor backward"] for degree in (1, 4))
    away = in_a_layer * 3 / 4
    # Two layers' weights at a time, in two bytes. What is summed beside them is the gradient of the head.
    assert alone["actor gathered weights"] - shared["actor gathered weights"] == pytest.approx(2 * 2 * away)
    routed = 3 * mixture.routed_bytes_per_token * 8192
    assert shared["actor activations"] - alone["actor activations"] == pytest.approx(1.45 * routed)


def test_a_reward_model_scores_validations_beside_an_engine_that_is_awake():
    keys = (*OFFLOADED, "reward.reward_model.enable=true", "reward.reward_model.model.path=rm")
    engines = {}
    for validates in (True, False):
        more = (
            ("trainer.val_before_train=true",)
            if validates
            else ("trainer.val_before_train=false", "trainer.test_freq=-1")
        )
        (ledger,) = [
            one
            for one in ledgers_of(config(*keys, *more), {"actor": SEVEN, "rm": SEVEN}, "cuda", CARD)
            if not one.is_host
        ]
        engines[validates] = phase_of(ledger, "rm scores")
    assert engines[True]["engine"] == 0.5 * CARD
    assert "engine" not in engines[False] and "engine asleep" in engines[False]


def test_the_first_rank_holds_the_folder_of_weights_until_it_is_written():
    for contents, copies in (("[model,optimizer,hf_model]", 2 * SEVEN.parameters), ("[model,optimizer]", 0)):
        keys = ("trainer.save_freq=5", f"actor_rollout_ref.actor.checkpoint.save_contents={contents}")
        _, host = ledgers_of(config(*ONE_CARD, *keys), {"actor": SEVEN}, "cuda", CARD)
        assert phase_of(host, "checkpoint").get("actor folder hf", 0) == copies
