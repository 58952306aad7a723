"""Models over two processes are compared with one before a run: docs/models.md says what is found, no fault passes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import CONFIG_MAPPING

from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import KINDS
from hrl.models import adapter
from hrl.models.probe import GRADIENT_TOLERANCE, MOST_GRADIENT_ROUNDING, MOST_ROUNDING
from hrl.preflight import layout_look
from hrl.preflight.findings import Findings
from hrl.workers.layout_probe import ADAPTER, LAYOUTS, LayoutRequest, LayoutResult, compare_adapter
from hrl.workers.layout_ranks import LayoutRanks, LayoutRanksError
from tests.models.table import (
    COLUMNS,
    COMPLETED,
    LONG_RUN_TOKENS,
    REFUSED,
    RIGHT,
    UNPACKED,
    VARIANTS,
    compare_in_layouts,
)
from tests.models.test_table import lines  # noqa: F401 - a fixture
from tests.preflight.small_run import small_run

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: Families whose line is computed again here: a mixture with frozen parts in its layers and layers beside its experts,
#: sinks, and one that is refused twice.
HOLD = ["ernie4_5_moe", "granite_swa", "gpt2"]
#: A Llama whose attention depends on how many heads it sees, and whose last norm is read where nothing gathers it.
ODD = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        out, weights = super().forward(hidden_states, *args, **kwargs)
        return out * self.q_proj(hidden_states).shape[-1] ** 0.5, weights


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = OddAttention(config, index)
        self.post_init()
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[LayoutRanks]:
    with LayoutRanks() as both:
        yield both


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], list[str]]:
    """The cells of the table of layouts by family and setting."""
    found = [line for line in PAGE.read_text().partition("## Layouts")[2].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]
    return {(line[0].strip("`"), line[1]): line[2:] for line in cells}


def odd_model(folder: Path) -> Path:
    """A folder with code of its own."""
    folder.mkdir()
    (folder / "modeling_odd.py").write_text(ODD)
    code = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 2, "vocab_size": 64, "model_type": "odd"}
    (folder / "config.json").write_text(json.dumps({"auto_map": code, **fields, **sizes}))
    return folder


def family_folder(folder: Path, family: str) -> Path:
    CONFIG_MAPPING[family](**COMPLETED.get(family, {})).save_pretrained(folder)
    return folder


def test_what_is_right_has_a_line_in_which_every_figure_is_rounding(lines, table):  # noqa: F811
    assert set(table) == {key for key, (verdict, *_) in lines.items() if verdict != REFUSED}
    for key, (*cells, why) in table.items():
        for name, cell in zip(LAYOUTS, cells, strict=True):
            if cell == REFUSED:
                assert f"{COLUMNS[name]}: " in why, key
            elif cell == "–":
                assert name == "experts" or (name == "sequence" and lines[key][0] == UNPACKED), key
            else:
                value, gradient = map(float, cell.split(", "))
                assert value < MOST_ROUNDING and gradient < MOST_GRADIENT_ROUNDING, (key, name)
                assert value > 1e-4 or gradient < GRADIENT_TOLERANCE, (key, name)


@pytest.mark.parametrize("family", HOLD)
def test_the_page_says_what_two_processes_find(ranks, table, lines, family):  # noqa: F811
    for setting, fields in [("", {}), *((each, changes) for name, each, changes in VARIANTS if name == family)]:
        packs = lines[family, setting][0] == RIGHT
        *cells, why = compare_in_layouts(ranks, family, setting, packs_rows=packs, **fields).cells()[2:]
        kinds = [cell if cell in (REFUSED, "–") else "equal" for cell in cells]
        told = [cell if cell in (REFUSED, "–") else "equal" for cell in table[family, setting][:-1]]
        assert (kinds, why) == (told, table[family, setting][-1])


def test_a_family_that_is_right_in_one_layout_and_wrong_in_another_is_caught(ranks, tmp_path):
    folder = str(odd_model(tmp_path / "odd"))
    found = ranks.ask(LayoutRequest(folder, {}, True, 64, False, ("sequence", "tensor")), 300.0)
    assert found["sequence"].is_right
    assert found["tensor"].wrong == "its log-probs are not those of one process" and found["tensor"].difference > 0.1


def test_processes_that_are_late_or_end_are_named(ranks, tmp_path):
    request = LayoutRequest(str(family_folder(tmp_path / "llama", "llama")), {}, False, 64, False, ("shards",))
    assert ranks.ask(request, 300.0)["shards"].is_right
    with pytest.raises(LayoutRanksError, match=r"the 2 of 2 processes did not compare it within 0.01 s"):
        ranks._answers(0.01, "did not compare it")
    ranks._processes[1].kill()
    with pytest.raises(LayoutRanksError, match=r"process 1 did not compare .*llama: it ended with exit status -9"):
        ranks.ask(request, 300.0)
    assert not ranks._processes, "the other waits for the one that ended"
    broken = SimpleNamespace(path="it", plain=lambda: {"no_such_field": 1})
    with pytest.raises(
        LayoutRanksError, match=r"did not compare it: it ended with exit status 1 \(TypeError: .*no_such"
    ):
        ranks.ask(broken, 300.0)


# ---- adapters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dots1", "phimoe"])
def test_an_adapter_of_a_mixture_is_what_is_added_to_its_weights(tmp_path, family):
    """dots1 has linear layers beside its experts with names that peft takes for theirs; phimoe's router is one."""
    request = LayoutRequest(str(family_folder(tmp_path / family, family)), {}, False, LONG_RUN_TOKENS, False, ())
    result = compare_adapter(request, ADAPTER)
    assert result.is_right and 0 < result.gradient_difference < 1e-4


def test_an_adapter_that_is_left_out_of_the_sum_is_caught(tmp_path, monkeypatch):
    request = LayoutRequest(str(family_folder(tmp_path / "llama", "llama")), {}, False, 64, False, ())
    parts_of = adapter.parts_of
    monkeypatch.setattr("hrl.workers.layout_probe.parts_of", lambda name: None if "up_proj" in name else parts_of(name))
    assert compare_adapter(request, ADAPTER).wrong == "its log-probs are not those of one process"


def test_the_layers_of_an_adapters_folder_are_those_that_are_compared(tmp_path, monkeypatch):
    request = LayoutRequest(str(family_folder(tmp_path / "llama", "llama")), {}, False, 64, False, ())
    LoraConfig(r=8, target_modules=["q_proj", "v_proj"]).save_pretrained(str(tmp_path / "hf"))
    of_folder = replace(ADAPTER, rank=0, path=str(tmp_path / "hf"))
    assert compare_adapter(request, of_folder).is_right
    parts_of = adapter.parts_of
    monkeypatch.setattr("hrl.workers.layout_probe.parts_of", lambda name: None if "up_proj" in name else parts_of(name))
    assert compare_adapter(request, of_folder).is_right, "it has none there"


# ---- before a run ----------------------------------------------------------------------------------------------

ACTOR = "actor_rollout_ref.actor.fsdp_config"


def findings_of(folder: Path, monkeypatch: pytest.MonkeyPatch, found: LayoutResult, *asked: str) -> Findings:
    """What a run is told where two processes find something."""
    config = compose_kind(KINDS["ppo"], [*small_run(folder), "trainer.device=cpu", *asked])
    findings, outline = Findings(), outline_of(config)
    monkeypatch.setattr(LayoutRanks, "ask", lambda _, request, __: dict.fromkeys(request.layouts, found))
    monkeypatch.setattr("hrl.workers.layout_probe.compare_adapter", lambda *_: found)
    layout_look.look_at_layouts(findings, outline, {"actor": folder / "policy"}, config.trainer.seed)
    return findings


def test_a_layout_that_would_train_wrongly_is_refused_by_its_key(tmp_path, monkeypatch):
    wrong = LayoutResult(0.5, 0.0, wrong="its log-probs are not those of one process")
    asked = ("trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_parallel_size=2")
    (problem,) = findings_of(tmp_path, monkeypatch, wrong, *asked).problems
    assert problem.key == f"{ACTOR}.tensor_parallel_size"
    assert problem.what.startswith(f"is 2, and llama at {tmp_path / 'policy'} would be trained wrongly so: its log-pr")
    assert "largest difference 0.5" in problem.what
    assert problem.hint.startswith("Set it to 1, or take another family, see docs/models.md; ")


def test_an_adapter_that_would_be_wrong_is_refused_by_its_rank(tmp_path, monkeypatch):
    wrong = LayoutResult(float("inf"), 0.0, wrong="it fails (RuntimeError: no)")
    (problem,) = findings_of(tmp_path, monkeypatch, wrong, "actor_rollout_ref.model.lora_rank=4").problems
    assert problem.key == "actor_rollout_ref.model.lora_rank"
    assert problem.what.endswith("would be trained wrongly so: it fails (RuntimeError: no).")


def test_layers_that_a_small_cut_has_not_leave_an_adapter_unchecked(tmp_path, monkeypatch):
    absent = LayoutResult(float("inf"), 0.0, refused="no layer is named layers.20")
    findings = findings_of(tmp_path, monkeypatch, absent, "actor_rollout_ref.model.lora_rank=4")
    assert not findings.problems
    assert findings.unchecked == [
        "actor_rollout_ref.model.lora_rank: not compared on a small cut of the model: no layer is named layers.20"
    ]


def test_heads_that_two_processes_can_not_share_leave_a_layout_unchecked(tmp_path, monkeypatch):
    uneven = LayoutResult(float("inf"), 0.0, refused="its 3 heads can't be shared by 2 processes", is_uneven=True)
    asked = ("trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    findings = findings_of(tmp_path, monkeypatch, uneven, *asked)
    assert not findings.problems
    assert findings.unchecked[0].startswith(f"{ACTOR}.ulysses_sequence_parallel_size: policy can't lie on two")


def test_a_run_in_which_no_processes_work_together_compares_no_layout(tmp_path):
    config = compose_kind(KINDS["ppo"], [*small_run(tmp_path), "trainer.device=cpu", "trainer.n_gpus_per_node=2"])
    assert not layout_look.has_layouts(outline_of(config))
