"""Writes docs/models.md: every causal family of transformers, put through the comparison that a run begins with.

    python -m tests.models.table > docs/models.md

Each row is a family's default configuration, or one with settings that people train, as random weights. What is right
is then compared in every layout, on two processes. Names given on the command line are compared and printed
alone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hrl.models.probe import ProbeError, ProbeResult, probe_config
from hrl.workers.layout_probe import LAYOUTS, Layout, LayoutRequest, LayoutResult
from hrl.workers.layout_ranks import LayoutRanks, LayoutRanksError

#: A run longer than any window, chunk or pre-training: whatever a family does beyond some length, it does here.
LONG_RUN_TOKENS = 1 << 24
RIGHT, UNPACKED, REFUSED = "right packed", "right unpacked", "refused"
#: What is refused of every dense family, and of every one that is not packed.
DENSE, NOT_PACKED = "has no experts", "a row can't be cut"
COLUMNS: dict[Layout, str] = {
    "shards": "FSDP2",
    "sequence": "SP 2",
    "tensor": "TP 2",
    "experts": "EP 2",
    "adapter": "LoRA",
}
#: For one family in all layouts.
DEADLINE_S = 600.0

#: What a default configuration lacks to describe a model at all.
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 11, "num_hidden_layers": 33},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "reformer": {"is_decoder": True},
}

_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}
_GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22}

#: Settings beside the default that published models have: family, how a reader knows it, fields.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "RoPE of Llama 3.1", {"rope_parameters": _LLAMA3, "max_position_embeddings": 131072}),
    ("llama", "dynamic RoPE", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", "biased projections, tied", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", "YaRN", {"rope_parameters": _YARN, "max_position_embeddings": 131072}),
    ("qwen2", "sliding windows", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    ("qwen2_moe", "sliding windows", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    (
        "phi3",
        "LongRoPE (128k)",
        {
            "rope_parameters": _LONGROPE,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 262144,
        },
    ),
    ("phimoe", "sliding window", {"sliding_window": 4096}),
    ("mistral", "no window", {"sliding_window": None}),
    ("mixtral", "router jitter", {"router_jitter_noise": 0.1}),
    ("seed_oss", "dropout", {"attention_dropout": 0.1, "residual_dropout": 0.1}),
    ("starcoder2", "dropout, window", {"attention_dropout": 0.1, "residual_dropout": 0.1, "sliding_window": 4096}),
    ("granite", "published factors", {**_GRANITE, "logits_scaling": 8.0}),
    ("granitemoe", "published factors", {**_GRANITE, "logits_scaling": 8.0}),
    ("gemma3_text", "with caps", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}),
    ("olmo2", "tied", {"tie_word_embeddings": True}),
    ("lfm2", "convolutions", {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16}),
    ("deepseek_v3", "without query rank", {"q_lora_rank": None}),
    ("smollm3", "YaRN", {"rope_parameters": _YARN, "max_position_embeddings": 131072}),
    ("gpt_neox", "no parallel residual", {"use_parallel_residual": False}),
    ("opt", "350m", {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "hidden_size": 1024}),
    ("minimax_m3_vl_text", "sparse attention", {"layer_types": ["minimax_m3_sparse"] * 60}),
    ("doge", "mixture of experts", {"is_moe": True}),
]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        family: `model_type`.
        setting: how it differs from the default; empty where it does not.
        verdict: `RIGHT`, `UNPACKED` or `REFUSED`.
        result: of the comparison, where it came to one.
        why: it is refused, or not packed; empty where it is right packed.
    """

    family: str
    setting: str
    verdict: str
    result: ProbeResult | None
    why: str

    def cells(self) -> list[str]:
        """Of the Markdown table."""
        figures = ["–"] * 3
        if self.result is not None:
            r = self.result
            gradient = "–" if self.verdict == REFUSED and not r.gradient_difference else f"{r.gradient_difference:.0e}"
            figures = [f"{r.difference:.0e}", f"{r.packing_difference:.0e}", gradient]
        return [f"`{self.family}`", self.setting, self.verdict, *figures, self.why]


def compare(family: str, setting: str = "", **fields: Any) -> Row:
    """The comparison of one family with some fields of its configuration."""
    try:
        config = CONFIG_MAPPING[family](**(COMPLETED.get(family, {}) | fields))
    except (StrictDataclassError, TypeError, ValueError) as error:
        return Row(family, setting, REFUSED, None, f"no language model alone: {_one_line(error)}")
    try:
        with quiet():
            result = probe_config(config, LONG_RUN_TOKENS)
    except ProbeError as error:
        return Row(family, setting, REFUSED, None, _one_line(error))
    verdict = REFUSED if not result.is_right else RIGHT if result.packs_rows else UNPACKED
    return Row(family, setting, verdict, result, result.cause or _shortened(result.why_not_packed))


@dataclass(frozen=True)
class LayoutRow:
    """A line of the table of layouts.

    Attributes:
        family: `model_type`.
        setting: how it differs from the default; empty where it does not.
        results: of all layouts.
    """

    family: str
    setting: str
    results: dict[Layout, LayoutResult]

    @property
    def why(self) -> str:
        """Why layouts are refused, but for experts of a dense family."""
        reasons = {name: result.refused or result.wrong for name, result in self.results.items()}
        told = {name: text for name, text in reasons.items() if text and not text.endswith((DENSE, NOT_PACKED))}
        return "; ".join(f"{COLUMNS[name]}: {_one_line(text)}" for name, text in told.items())

    def cells(self) -> list[str]:
        """Of the Markdown table."""
        return [f"`{self.family}`", self.setting, *(self._cell(self.results[name]) for name in LAYOUTS), self.why]

    def _cell(self, result: LayoutResult) -> str:
        if result.is_right:
            return f"{result.difference:.0e}, {result.gradient_difference:.0e}"
        return "–" if result.refused.endswith((DENSE, NOT_PACKED)) else REFUSED


def compare_in_layouts(
    ranks: LayoutRanks, family: str, setting: str = "", *, packs_rows: bool = True, **fields: Any
) -> LayoutRow:
    """The comparison of a family that is right in every layout."""
    config = CONFIG_MAPPING[family](**(COMPLETED.get(family, {}) | fields))
    with tempfile.TemporaryDirectory() as folder, quiet():
        config.save_pretrained(folder)
        request = LayoutRequest(folder, {}, False, LONG_RUN_TOKENS, False, LAYOUTS, packs_rows)
        try:
            results = ranks.ask(request, DEADLINE_S)
        except LayoutRanksError as error:
            text = str(error).replace(folder, family)
            results = dict.fromkeys(LAYOUTS, LayoutResult(float("inf"), 0.0, wrong=text))
    return LayoutRow(family, setting, results)


def all_layout_rows(rows: list[Row]) -> Iterator[LayoutRow]:
    """One for every row that is right."""
    fields = {(name, setting): changes for name, setting, changes in VARIANTS}
    with LayoutRanks() as ranks:
        for row in rows:
            if row.verdict != REFUSED:
                own, packs = fields.get((row.family, row.setting), {}), row.verdict == RIGHT
                yield compare_in_layouts(ranks, row.family, row.setting, packs_rows=packs, **own)


def all_rows() -> Iterator[Row]:
    """One row for every causal family, in alphabetical order, and one for every variant."""
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        yield compare(family)
        for name, setting, fields in VARIANTS:
            if name == family:
                yield compare(family, setting, **fields)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is switched off in a cut is no news here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _one_line(error: Exception | str) -> str:
    return _shortened(str(error))


def _shortened(message: str) -> str:
    text = " ".join(message.split()).replace("|", "\\|")
    return text if len(text) <= 280 else text[:279] + "…"


ABOUT_UNPACKED = [
    "## Unpacked",
    "",
    "Layers that carry a state along the row (Mamba, gated delta nets and other linear attention, short",
    "convolutions) would carry it from one row of a packed micro-batch into the next. The same holds for what",
    "counts positions over the packed row, and a few families have an attention that only their own code computes.",
    "Their rows are not packed: each stands by itself, padded on the right, where no layer that goes from left to",
    "right sees the padding before a token. Nothing is asked for by a key, and no list of families decides: the",
    "comparison does, and the banner and `hrl check` say so and why. If one model of a run needs it, all of its",
    "models get padded rows.",
    "",
    "- **Rows of about one length run together.** The plan sorts rows by length and cuts where padding would cost",
    "  more than another micro-batch, which counts as 1,024 tokens. `…max_token_len_per_gpu` is kept with the",
    "  padding counted.",
    "- **Samples of a group do not share their prompt**, and turns of an episode not their beginning: each row is",
    "  whole. A [picture](pictures.md) that several rows show is still computed once.",
    "- **Experts** of padding are computed and dropped: they are in no loss, no load and no metric.",
    "- **Attention** is transformers' own (`sdpa` where the family has it), and so are states: by torch on a CPU;",
    "  on a GPU by `causal-conv1d`, `flash-linear-attention` and `mamba-ssm` where they are installed, else by",
    "  torch, which transformers says, and which is much slower. Nothing of this was run on a GPU yet.",
    "- **FSDP2, expert groups and adapters** are compared like those of packed models, and so are tensor groups,",
    "  for which few of these families have a plan. Sequence groups (`ulysses_sequence_parallel_size`) need packed",
    "  rows, and are refused.",
    "- **Engines.** `rollout.name=hf` samples contexts of one length together, without padding, since the caches of",
    "  some families are wrong beside it. vLLM on a CPU runs those of the families that it has kernels for there,",
    "  without prefix caching. Falcon-H1 gives the log-probs of rows alone to 5e-5 in float32, in a test. As for every",
    "  model, `rollout/logprob_diff_max` of the first step says whether an engine agrees with the trainer.",
    "- **Rounding of decays.** In bfloat16 the decays (`A_log`, `dt_bias`) are rounded like other weights;",
    "  transformers keeps them in no other dtype either. Rounding them alone moves log-probs by 0.002 to 0.008 in the",
    "  mean, rounding all weights and products by 0.012 to 0.029, and of that at most 0.0013 goes with decays in",
    "  float32 (random models of Qwen3-Next, Qwen3.5, Falcon-H1, Granite-4 and Mamba-2, rows of 512 tokens).",
    "- **Zamba2** lets no time step be shorter than its `time_step_min` where it reads whole rows, and does not hold",
    "  to that where it decodes token by token: transformers' own two forms differ by 1e-4 in a tiny model, and",
    "  `rollout.name=hf` samples by the second.",
    "",
]


def page(rows: list[Row], layouts: list[LayoutRow]) -> str:
    """docs/models.md."""
    right, unpacked = (sum(row.verdict == verdict for row in rows) for verdict in (RIGHT, UNPACKED))
    equal = {name: sum(row.results[name].is_right for row in layouts) for name in LAYOUTS}
    counts = ", ".join(f"{COLUMNS[name]} {count}" for name, count in equal.items())
    lines = [
        "# Models",
        "",
        "<!-- Written by `make models`; edit tests/models/table.py instead. -->",
        "",
        "hrl trains a family because it has compared it, not because it knows its name. Before a run starts an engine",
        "or loads a weight, the driver builds a small cut of each model: the first layers of every kind, the widths",
        "of its heads, all of its experts and switches, and random weights. Two prompts with two answers each go",
        "through it packed, as in training, in two different packings, and also one sequence at a time through the",
        "model's own plain forward. Log-probs must agree to 1e-4 in float32, and the gradients of all parameters to",
        "one part in a hundred. For a model that amplifies rounding, both limits grow with the effect that one",
        "rounding of its weights has, at most a hundredfold. The comparison takes a few seconds. A model that",
        "differs is compared [unpacked](#unpacked), and one that differs then too is refused, with the difference and",
        "its likely cause; `actor_rollout_ref.model.probe=false` (`model.probe=false` in offline runs) skips the",
        "comparison, and rows are packed. Only the driver compares, on its CPU: the result depends on a model's config",
        "and code, which are the same on every node, so ranks don't repeat it. `hrl check` makes the same comparison.",
        "",
        "Only what a run reaches counts: a sliding window of 32,768 tokens matters only to a run with longer",
        "sequences. The lengths at which a layer computes differently are found by the names of their fields in",
        "`config.json` (windows, chunks, blocks of sparse attention, the pre-training length of a RoPE).",
        "",
        "Four things hold for every family when it is loaded:",
        "",
        "- **Nothing is random.** Dropout of every kind, router noise and layer drop are off, in the update too, since",
        "  the sampler has none. A log line names what the `config.json` would have switched on.",
        "- **RoPE does not depend on the batch.** LongRoPE (Phi-3-128k, Phi-4-mini) uses its long factors if the run's",
        "  longest sequence (`rollout.max_model_len`, or prompt plus response) is above the pre-training length, and",
        "  its short ones otherwise; dynamic RoPE uses the frequencies of that longest sequence. vLLM is started for",
        "  the same length and follows the same rule.",
        "- **`override_config` takes what may be in a `config.json`**, in the forms that model cards show",
        "  (`rope_scaling`, `rope_theta`), and trainer, engine and export see the same result.",
        "- **The weights are the folder's.** A weight that the files lack, hold under another name or in another",
        "  shape, or hold although the `config.json` ties it to another one, is refused by name. Weights that the",
        "  model has no place for are named in a warning.",
        "",
        f"The table has {len(rows)} configurations of the causal families in transformers {__version__}, compared as",
        f"for a run that crosses every length: {right} are right packed, {unpacked} are right unpacked, and",
        f"{len(rows) - right - unpacked} are refused. The figures are the largest difference of a log-prob from the",
        "model's own forward, the largest difference between two packings (two ways to pad rows that are not packed),",
        "and the largest relative difference of a parameter's gradient; differences around 1e-6 are rounding.",
        "Critics and reward models go through the same comparison as sequence classifiers, which not every family has.",
        "",
        "| Family | Setting | Verdict | Own forward | Packings | Gradients | Why not packed, or refused |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
        *ABOUT_UNPACKED,
        "## Layouts",
        "",
        "What is right is compared once more, on two processes over gloo, in float32: the same cut of the",
        "model, laid out and loaded as the engine does it, against one process. The first figure of a cell is the",
        "largest difference of a log-prob, the second the largest relative difference of a parameter's gradient.",
        "A model that amplifies rounding beyond its bounds is compared in float64 instead.",
        "",
        "- **FSDP2**: weights sharded over both processes, each of which runs rows of its own.",
        "- **SP 2**: both run the same rows, each a slice of the tokens (`ulysses_sequence_parallel_size=2`).",
        "- **TP 2**: both run the same rows, each with a part of every large weight (`tensor_parallel_size=2`).",
        "- **EP 2**: each runs rows of its own and has half of a mixture's experts (`expert_parallel_size=2`).",
        "- **LoRA**: FSDP2 with an adapter on all linear layers (`target_modules=all-linear`), against the model to",
        "  whose weights the adapter was added, by its own plain forward. The gradients are those of the adapter,",
        "  against the ones that follow from the merged weights by the chain rule.",
        "",
        "`refused` is refused before a run starts, with the reason beside it; `–` is a family without experts, or",
        "one whose rows are not packed, and then can't be cut into slices. A run whose configuration has one of the",
        "last four layouts makes the comparison of its own model before it starts anything, with two processes on",
        "the driver's CPU (for an adapter, in the driver itself), and so does `hrl check`; where rows are not packed,",
        "a run of several processes compares the first layout too. A model that is not equal is refused by the key",
        "that asks for the layout; `actor_rollout_ref.model.probe=false` skips this comparison too.",
        "",
        f"Equal, of {len(layouts)} configurations: {counts}.",
        "",
        f"| Family | Setting | {' | '.join(COLUMNS.values())} | Why not |",
        f"| --- | --- | {' | '.join('---' for _ in COLUMNS)} | --- |",
        *("| " + " | ".join(row.cells()) + " |" for row in layouts),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums in the same order, on any machine
    if sys.argv[1:]:
        settings = [(name, "", {}) for name in sys.argv[1:]] + [v for v in VARIANTS if v[0] in sys.argv[1:]]
        rows = [compare(name, setting, **fields) for name, setting, fields in settings]
        for line in (*rows, *all_layout_rows(rows)):
            sys.stdout.write("| " + " | ".join(line.cells()) + " |\n")
    else:
        rows = list(all_rows())
        sys.stdout.write(page(rows, list(all_layout_rows(rows))))
