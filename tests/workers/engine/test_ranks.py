"""One rank and two ranks are the same model: gradients, full parameters, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from hrl.trained.replay import replay
from tests.models.tiny import run_ranks, save_gemma3, save_llama, save_mixture, world_of_one
from tests.workers.engine.ranks import (
    CHECKED_DTYPES,
    everything_on_two_ranks,
    load_and_train,
    one_sided_gradients,
    policy_of,
    rounded_weights,
    shared_and_unshared_gradients,
    train_and_save,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {
        "model": save_llama(root / "model"),
        "mixture": save_mixture(root / "mixture", "qwen3_moe"),
        "gemma3": save_gemma3(root / "gemma3"),
        "untied": save_llama(root / "untied", tied=False),
        **{name: root / name for name in ("single", "double")},
        "root": root,
    }


@pytest.fixture(scope="module", autouse=True)
def one(folders) -> Iterator[dict[str, Any]]:
    """What one rank computes; its world stays for the tests."""
    with world_of_one():
        yield {
            "gradients": shared_and_unshared_gradients(0, folders["model"], 1),
            "straight": train_and_save(0, folders["model"], folders["single"], 1),
        }


@pytest.fixture(scope="module")
def two(folders, one) -> list[dict[str, Any]]:
    """What each of two ranks computes."""
    arguments = (folders[name] for name in ("model", "mixture", "gemma3", "untied", "single", "double"))
    return run_ranks(2, folders["root"] / "two", everything_on_two_ranks, *arguments)


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert mine.keys() == theirs.keys()
    difference = torch.stack([(mine[name] - theirs[name]).norm() for name in mine]).norm()
    return float(difference / torch.stack([value.norm() for value in theirs.values()]).norm())


def test_gradients_do_not_depend_on_shared_prompts_or_empty_micro_batches(one, two):
    runs = one["gradients"] | two[0]["gradients"]
    first = next(iter(runs.values()))
    distances = {name: distance(grads, first) for name, grads in runs.items()}
    assert len(runs) == 6
    assert max(distances.values()) <= 1e-12, distances
    assert all(grad.abs().max() > 0 for grad in first.values())


def test_a_rank_without_rows_changes_nothing(folders, two):
    alone = one_sided_gradients(0, folders["model"], 1)
    assert distance(two[0]["one_sided"], alone) <= 1e-12


def test_embedding_and_head_are_units_of_their_own_and_give_the_gradients_of_one_rank(folders, two):
    alone = one_sided_gradients(0, folders["untied"], 1)
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} < alone.keys()
    assert distance(two[0]["untied"], alone) <= 1e-12


@pytest.mark.parametrize("model, held", [("untied", set()), ("model", {"model.model.embed_tokens.weight"})])
def test_the_root_gathers_neither_unless_they_are_one(folders, model, held):
    module = policy_of(folders[model]).engine.module
    inner = {
        id(p)
        for unit in module.modules()
        if unit is not module and isinstance(unit, FSDPModule)
        for p in unit.parameters()
    }
    root = {name for name, parameter in module.named_parameters() if id(parameter) not in inner}
    assert root == {"model.model.norm.weight"} | held


def test_full_parameters_are_the_files_with_tied_ones_once(folders, two):
    want = AutoModelForCausalLM.from_pretrained(folders["model"], dtype=torch.bfloat16).state_dict()
    for rank in two:
        assert rank["specs_match"]
        assert list(rank["full"]) == [name for name in want if name != "lm_head.weight"]
        for name, tensor in rank["full"].items():
            assert torch.equal(tensor, want[name]), name


def test_a_mixture_of_experts_leaves_two_ranks_as_it_lies_in_its_folder(folders, two):
    want = load_file(folders["mixture"] / "model.safetensors")
    for rank in two:
        assert rank["mixture"].keys() == want.keys()
        assert all(torch.equal(rank["mixture"][name], want[name]) for name in want)


def test_one_rank_gives_the_same_parameters_in_the_same_order(folders, two):
    policy = policy_of(folders["model"], "float32")
    mine = dict(policy.engine.iter_full_params(torch.bfloat16))
    assert list(mine) == list(two[0]["full"]) == [spec.name for spec in policy.engine.param_specs(torch.bfloat16)]
    assert all(torch.equal(mine[name], two[0]["full"][name]) for name in mine)


def test_a_resumed_run_is_bit_identical(folders, one, two):
    pairs = [(one["straight"], load_and_train(0, folders["model"], folders["single"], 1))]
    pairs += [(rank["straight"], rank["resumed"]) for rank in two]
    for straight, resumed in pairs:
        assert resumed["rates"] == straight["rates"] == pytest.approx([3e-3 / 6, 4e-3 / 6])
        assert torch.equal(resumed["random"], straight["random"])
        for half in ("saved", "after"):
            assert all(torch.equal(resumed[half][name], straight[half][name]) for name in straight[half])


def test_offloading_shards_of_unequal_size_changes_no_number(two):
    assert all(rank["offloading_changes_nothing"] for rank in two)


def test_bfloat16_masters_are_rounded_alike_on_any_number_of_ranks(two):
    alone = rounded_weights(0)
    for rank in two:
        # Where shards are cut, a kernel's last bit of the float32 number may differ, and rarely the rounding with it.
        assert (rank["rounded"] != alone).double().mean() < 2e-3


def test_every_rank_freezes_what_rank_0_found(folders, two):
    alone = sorted(policy_of(folders["gemma3"], "float32").engine.frozen_names())
    assert alone and all(rank["frozen"] == alone for rank in two)


def test_ranks_have_their_own_random_state(two):
    assert not torch.equal(two[0]["straight"]["random"], two[1]["straight"]["random"])


def test_another_number_of_ranks_loads_the_same_state(folders, one, two):
    fewer = load_and_train(0, folders["model"], folders["double"], 1)
    for straight, resumed in ((one["straight"], two[1]["from_one_rank"]), (two[0]["straight"], fewer)):
        assert all(torch.equal(resumed["saved"][name], straight["saved"][name]) for name in straight["saved"])
        assert distance(resumed["after"], straight["after"]) <= 1e-9


def test_checkpoints_hold_no_pickle(folders, two):
    files = [f for root in ("single", "double") for f in (folders[root] / "state").iterdir()]
    assert {f.suffix for f in files} == {".safetensors", ".json"}


def test_the_export_is_a_folder_that_transformers_loads(folders, two):
    for root, trained in (("single", None), ("double", two[0]["straight"]["saved"])):
        model = AutoModelForCausalLM.from_pretrained(folders[root] / "hf", dtype="auto")
        assert model.dtype == torch.float32 and model.config.architectures == ["LlamaForCausalLM"]
        for name, tensor in (trained or {}).items():
            torch.testing.assert_close(model.get_parameter(name.removeprefix("model.")), tensor.float())


@pytest.mark.parametrize("other, message", [("untied", "lm_head.weight"), ("missing", "holds no checkpoint")])
def test_a_checkpoint_of_another_model_is_refused(folders, tmp_path, other, message):
    path = save_llama(tmp_path / "other", tied=False) if other == "untied" else folders["model"]
    source = folders["single"] / "state" if other == "untied" else tmp_path
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        policy_of(path).engine.load(source)


def test_contents_that_were_not_saved_are_refused(folders, tmp_path):
    policy = policy_of(folders["model"])
    policy.engine.save(tmp_path / "weights", ["model"])
    with pytest.raises(ValueError, match=r"holds \['model'\], but .*optimizer"):
        policy.engine.load(tmp_path / "weights")
    policy.engine.load(tmp_path / "weights", ["model"])


def test_the_checksum_of_weights_is_that_of_one_rank(folders, two):
    alone = {dtype: policy_of(folders["model"], dtype).engine.weights_checksum() for dtype in CHECKED_DTYPES}
    for rank in two:
        assert {dtype: rank["checksums"][dtype] for dtype in CHECKED_DTYPES} == alone
        assert rank["checksums"]["replicas"] == alone["float32"]


def test_ranks_with_different_copies_of_a_weight_are_named(two):
    for rank in two:
        said = rank["checksums"]["error"]
        assert (
            said.startswith("ranks 0, 1 have different copies of weights")
            and "1 parameter(s), first model.model.norm" in said
        )


def test_what_two_ranks_kept_of_a_step_is_computed_again_by_one(folders, two):
    files = sorted((folders["root"] / "skipped" / "nonfinite").glob("*.json"))
    assert [file.name for file in files] == [f"step_7_rank_{rank}.actor-0.json" for rank in (0, 1)]
    whole = replay(files[::-1], model=str(folders["model"]))
    assert whole.has_same_weights and whole.has_all_ranks and whole.is_reproduced
    assert [math.isfinite(each.loss) for each in whole.micro_batches] == [True, True, True, False]
    half = replay(files[:1], model=str(folders["model"]))
    assert half.is_reproduced and not half.has_all_ranks
    assert [each.loss for each in half.micro_batches] == [each.loss for each in whole.micro_batches[:2]]
    assert "of these ranks alone" in "".join(half.lines())
