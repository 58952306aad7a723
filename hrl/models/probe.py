"""Check, before anything of a run starts, that a model family computes the same in training and alone.

The log-probs of packed training are right only if a family's attention, positions, masks, experts and head do nothing
that the packed path does not know of. No list of families could guarantee that: transformers has nearly two hundred,
and a family that the list missed would silently be trained wrongly. So a small cut of the model (`hrl.models.cut`) with
random weights runs a few short sequences

- packed, as the engine runs them, in two different packings;
- through the model's own plain forward, one sequence at a time, without padding.

The log-probs must agree, and so must the gradients of all parameters, with every layer recomputed. Of a model whose
layers carry a state along the row they do not: then the same is compared with the rows padded and each by itself, and
if that is right the run does so. This takes a second
or two on one core, in float32, and needs no GPU.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hrl.errors import HrlError
from hrl.models.cut import CROSSED_TOKENS, UNREACHED_TOKENS, cuts
from hrl.models.hf_config import load_config
from hrl.models.loading import (
    OWN_ATTENTION,
    ModelSource,
    attention_of,
    classifier_class,
    language_model_class,
    prepare,
)
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.ops.rope import fix_rope_frequencies, require_long_factors
from hrl.models.packed_model import (
    PackedCausalLM,
    PackedModel,
    PackedScalarModel,
    TokenRows,
    Wanted,
    pack_micro_batch,
)

logger = logging.getLogger(__name__)

#: The largest difference of two log-probs in float32 that counts as rounding, and the largest relative difference of
#: two gradients, which is larger because rounding may switch a ReLU.
LOG_PROB_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
#: A model that amplifies rounding is allowed SPREADS times what one rounding of all its weights does to its log-probs,
#: up to MOST_ROUNDING, which every real difference exceeds. Its bound on gradients grows in proportion, up to
#: MOST_GRADIENT_ROUNDING.
SPREADS, MOST_ROUNDING, MOST_GRADIENT_ROUNDING = 20.0, 1e-2, 0.1
#: Two prompts with two answers each, in tokens; all but one sequence cross `CROSSED_TOKENS` inside their prompt.
PROMPT_LENGTHS, ANSWER_LENGTHS = (11, 6), ((13, 9), (17, 4))
PACKINGS: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1, 2, 3),), ((3, 0), (2, 1)))
_WAY_OUT = (
    "Take another family, see docs/models.md; actor_rollout_ref.model.probe=false (model.probe=false in offline runs) "
    "skips this comparison, at your own risk"
)
#: Errors of a model's code that is given what it was not written for.
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ImportError)

_CPU = torch.device("cpu")


class ProbeError(HrlError, ValueError):
    """Training would compute a model wrongly; the message names family, difference and likely cause."""


@dataclass(frozen=True)
class ProbeResult:
    """How much the forward of training differs from the model's own.

    Attributes:
        family: Class of the model.
        num_layers: Layers of the cut that was compared.
        difference: Largest difference of a log-prob (of a score, for a scalar model) from the model's own forward.
        packing_difference: Largest difference between the two packings, or between two ways to pad the rows.
        gradient_difference: Largest relative difference of a parameter's gradient from the model's own; 0 if the
            log-probs differ already.
        cause: Likely cause of a difference that is not rounding; empty if there is none.
        seconds: Duration of the comparison.
        packs_rows: Whether rows were packed; else they were padded.
        why_not_packed: Why they are not packed, where padded ones are right.
    """

    family: str
    num_layers: int
    difference: float
    packing_difference: float
    gradient_difference: float
    cause: str
    seconds: float
    packs_rows: bool = True
    why_not_packed: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the differences are only rounding."""
        return not self.cause


def require_right(source: ModelSource, *, scalar: bool, packs_rows: bool | None = None) -> ProbeResult:
    """Refuse a model that training would compute wrongly. A process compares a model only once.

    Args:
        source: The model's folder, its overrides and the run's longest sequence.
        scalar: Whether it is a critic or reward model, whose backbone is run as a sequence classifier, instead of a
            causal language model.
        packs_rows: Whether rows are packed, or padded; None takes what is right, packed ones first.

    Raises:
        ProbeError: Names family, difference and likely cause.
        ModelConfigError: The overrides do not fit the model.
    """
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    overrides = json.dumps(dict(source.override_config), sort_keys=True)
    return _require_right(auto, source.path, overrides, source.trust_remote_code, source.max_model_len, packs_rows)


@cache
def _require_right(
    auto: Any, path: str, overrides: str, trust_remote_code: bool, max_model_len: int, packs_rows: bool | None
) -> ProbeResult:
    config = load_config(path, json.loads(overrides), trust_remote_code=trust_remote_code)
    name, how = f"{config.model_type} at {path}", "on padded rows" if packs_rows is False else "packed"
    try:
        result = probe_config(config, max_model_len, auto, trust_remote_code=trust_remote_code, packs_rows=packs_rows)
    except ProbeError as error:
        raise ProbeError(f"{name} cannot be trained {how}: {error}. {_WAY_OUT}") from error
    if not result.is_right:
        between = "two packings of the same rows" if result.packs_rows else "two ways to pad the same rows"
        raise ProbeError(
            f"{name} ({result.family}) would be trained wrongly {how}: its log-probs differ by {result.difference:.2g} "
            f"from its own forward and by {result.packing_difference:.2g} between {between}, its gradients by "
            f"{result.gradient_difference:.2g}. Likely cause: {result.cause}. {_WAY_OUT}"
        )
    logger.info(
        "%s computes %s what it computes alone (largest difference %.1e over %d layers, %.1f s)",
        name,
        "packed" if result.packs_rows else "on padded rows",
        result.difference,
        result.num_layers,
        result.seconds,
    )
    return result


def probe_config(
    config: PretrainedConfig,
    max_model_len: int,
    auto: Any = AutoModelForCausalLM,
    *,
    trust_remote_code: bool = False,
    packs_rows: bool | None = None,
) -> ProbeResult:
    """Compare the smallest cut of a configuration that runs.

    Args:
        config: The model's, with its overrides.
        max_model_len: The longest sequence of the run in tokens; what happens only beyond that does not matter.
        auto: `AutoModelForCausalLM` or `AutoModelForSequenceClassification`.
        trust_remote_code: Whether the config's folder may run code.
        packs_rows: Whether rows are packed, or padded; None pads them only if that is right and packing them is not.

    Raises:
        ProbeError: No cut runs alone, or the cut that does cannot run in training.
    """
    start = time.perf_counter()
    with unnoticed():
        family = Family(auto, max_model_len, trust_remote_code)
        cut, own = first_that_runs(config, family)
        result = _compare(cut, own, family) if packs_rows is None else _compare_in(cut, own, family, packs_rows)
    return replace(result, seconds=time.perf_counter() - start)


@contextmanager
def unnoticed() -> Iterator[None]:
    """Let cuts be built from one seed, with nothing said by transformers and no random number of the caller's taken."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class Family:
    """How cuts are built.

    Attributes:
        auto: transformers' class that builds them.
        max_model_len: The longest sequence of the run in tokens.
        trust_remote_code: Whether the model's folder may run code.
        dtype: Of their weights.
    """

    auto: Any
    max_model_len: int
    trust_remote_code: bool
    dtype: torch.dtype = torch.float32

    @property
    def is_scalar(self) -> bool:
        """Whether their output is one number instead of logits."""
        return self.auto is AutoModelForSequenceClassification

    def wrap(self, model: PreTrainedModel) -> PackedModel:
        """Return what runs packed rows through a model."""
        return PackedScalarModel(model) if self.is_scalar else PackedCausalLM(model)

    def build(self, config: PretrainedConfig, attention: str | None = "eager") -> PreTrainedModel:
        """Return a new model with random weights."""
        own = type(config).from_dict(config.to_dict())
        if self.is_scalar:
            own.num_labels = 1
        own.use_cache = False
        options = {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        how = attention_of(own) if attention == ATTENTION_NAME else attention
        return self._class_for(own).from_config(own, attn_implementation=how, **options).eval()

    def _class_for(self, config: PretrainedConfig) -> Any:
        return language_model_class(config) if self.auto is AutoModelForCausalLM else classifier_class(config)


# ---------------------------------------------------------------------------------------------- the two ways to run it


def first_that_runs(config: PretrainedConfig, family: Family) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return the smallest cut whose own forward runs, and its model with random weights."""
    failure: Exception = ValueError("its smallest copy is too large, or is not a valid configuration")
    try:
        for cut in cuts(config, family.max_model_len, family.build):
            try:
                model = _excite(family.build(cut))
                fix_rope_frequencies(model, UNREACHED_TOKENS)
                with torch.no_grad():
                    model(input_ids=_sequence(probe_rows(cut), 0))
            except FAILURES as error:
                failure = error
                continue
            return cut, model
    except FAILURES as error:
        failure = error
    raise ProbeError(f"no small cut of it runs alone on plain tokens ({first_line(failure)})") from failure


@torch.no_grad()
def _excite(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model weights with which every part has an effect: no uniform attention, no bias or sink of zero."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    is_tied = head is not None and head.weight is embedding
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            is_plain_embedding = parameter is embedding and not is_tied
            parameter.normal_(0.0, 1.0 if is_plain_embedding else 1.5 * parameter.shape[-1] ** -0.5)
        elif not name.endswith(("A_log", "dt_bias")):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def _compare(cut: PretrainedConfig, own: PreTrainedModel, family: Family) -> ProbeResult:
    """Compare packed rows, and only if they are not right padded ones; of two that are not right return the first."""
    packed, refusal = None, None
    try:
        packed = _compare_in(cut, own, family, packs_rows=True)
        if packed.is_right:
            return packed
    except ProbeError as error:
        refusal = error
    why = str(refusal) if packed is None else packed.cause
    try:
        own.zero_grad()
        padded = _compare_in(cut, own, family, packs_rows=False)
    except ProbeError as error:
        logger.debug("%s: padded rows: %s", type(own).__name__, error)
    else:
        if padded.is_right:
            return replace(padded, why_not_packed=why)
        logger.debug("%s: padded rows: %s", type(own).__name__, padded.cause)
    if packed is None:
        assert refusal is not None, "it is either compared or refused"
        raise refusal
    return packed


def _compare_in(cut: PretrainedConfig, own: PreTrainedModel, family: Family, packs_rows: bool) -> ProbeResult:
    scalar, rows = family.is_scalar, probe_rows(cut)
    plain = plain_values(own, rows, scalar)
    try:
        model = packed_copy(cut, own, family, packs_rows=packs_rows)
        require_long_factors(model)
        module = family.wrap(model)
        first, second = (packed_values(module, rows, packing, scalar, packs_rows) for packing in PACKINGS)
    except FAILURES as error:
        raise ProbeError(_why_not_packed(error)) from error
    result = ProbeResult(
        family=type(own).__name__,
        num_layers=cut.get_text_config().num_hidden_layers,
        difference=largest(first - plain),
        packing_difference=largest(first - second),
        gradient_difference=0.0,
        cause="",
        seconds=0.0,
        packs_rows=packs_rows,
    )
    seen = max(result.difference, result.packing_difference)
    tolerance = tolerance_of(seen, own, cut, family, rows, plain)
    cause = _cause_of_values(result, first - plain, tolerance, own, module, rows)
    if cause:
        return replace(result, cause=cause)
    weights = torch.randn(plain.shape)
    apart = gradient_difference(gradients_of(model, first, weights), gradients_of(own, plain, weights))
    if apart > gradient_tolerance_of(tolerance):
        cause = "its log-probs agree and its gradients do not: part of it is differentiable in one of the two only"
    return replace(result, gradient_difference=apart, cause=cause)


def packed_copy(
    cut: PretrainedConfig, own: PreTrainedModel, family: Family, *, packs_rows: bool = True
) -> PreTrainedModel:
    """Return a model with the weights of `own` that runs packed rows, and its layers again in the backward pass."""
    model = family.build(cut, ATTENTION_NAME if packs_rows else OWN_ATTENTION)
    model.load_state_dict(own.state_dict())
    prepare(model, max_model_len=UNREACHED_TOKENS, recompute=True)
    return model


def tolerance_of(
    seen: float, own: PreTrainedModel, cut: PretrainedConfig, family: Family, rows: TokenRows, values: Tensor
) -> float:
    """Return up to which difference of a value only rounding is seen, for a model that amplifies it too.

    Args:
        seen: The largest difference.
        own: The model.
        cut: Its configuration.
        family: How it was built.
        rows: Its input.
        values: Of its own forward.
    """
    if not LOG_PROB_TOLERANCE < seen < MOST_ROUNDING:
        return LOG_PROB_TOLERANCE
    return max(LOG_PROB_TOLERANCE, min(SPREADS * _rounding(own, cut, family, rows, values), MOST_ROUNDING))


def gradient_tolerance_of(tolerance: float) -> float:
    """Return the bound on the relative difference of gradients that goes with one on values."""
    return min(GRADIENT_TOLERANCE * tolerance / LOG_PROB_TOLERANCE, MOST_GRADIENT_ROUNDING)


def gradients_of(model: nn.Module, values: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the weighted sum of the values, by parameter."""
    (values * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def probe_rows(config: PretrainedConfig) -> TokenRows:
    """Return two prompts with two answers each, without the tokens 0 to 3, which may be special."""
    rng, tokens = np.random.default_rng(0), config.get_text_config().vocab_size
    prompts: list[np.ndarray] = []
    lengths: list[int] = []
    for prompt_length, answers in zip(PROMPT_LENGTHS, ANSWER_LENGTHS, strict=True):
        prompt = rng.integers(4, tokens, prompt_length)
        prompts += [prompt] * len(answers)
        lengths += answers
    width = max(lengths)
    is_answer = np.arange(width)[None] < np.array(lengths)[:, None]
    filled = np.where(is_answer, rng.integers(4, tokens, is_answer.shape), 0)
    return TokenRows(prompts, filled, np.array(lengths), is_answer)


def _sequence(rows: TokenRows, row: int) -> Tensor:
    """Return the tokens of one row, `(1, L)`."""
    answer = rows.responses[row, : rows.response_lengths[row]]
    return torch.from_numpy(np.concatenate([rows.prompts[row], answer]))[None]


def plain_values(model: PreTrainedModel, rows: TokenRows, scalar: bool) -> Tensor:
    """Return log-probs `(B, R)` or scores `(B, 1)` of each row alone, without padding, by the model's own forward."""
    out = []
    for row, prompt in enumerate(rows.prompts):
        tokens = _sequence(rows, row)
        logits = model(input_ids=tokens).logits[0]
        if scalar:
            out.append(logits.reshape(1))
            continue
        log_probs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0]
        out.append(torch.nn.functional.pad(log_probs, (0, rows.responses.shape[1] - len(log_probs))))
    return torch.stack(out)


def packed_values(
    module: nn.Module, rows: TokenRows, packing: tuple[tuple[int, ...], ...], scalar: bool, packs_rows: bool = True
) -> Tensor:
    """Return the same as the engine computes it. Prompts are shared if all rows are in one micro-batch."""
    parts: dict[int, Tensor] = {}
    for picked in packing:
        is_one = len(packing) == 1
        values = values_of_rows(module, rows, picked, scalar=scalar, share_prefix=is_one, packs_rows=packs_rows)
        parts |= dict(zip(picked, values, strict=True))
    return torch.stack([parts[row] for row in sorted(parts)])


def values_of_rows(
    module: nn.Module,
    rows: TokenRows,
    picked: tuple[int, ...],
    *,
    scalar: bool,
    share_prefix: bool,
    group: SequenceGroup | None = None,
    packs_rows: bool = True,
) -> Tensor:
    """Return log-probs `(b, R)` or scores `(b, 1)` of the rows `picked`, which run as one micro-batch.

    Args:
        module: Runs packed rows.
        rows: All rows.
        picked: Which of them.
        scalar: Whether scores are computed.
        share_prefix: Compute equal prompts once.
        group: Ranks that compute them together.
        packs_rows: Whether they are packed, or padded.
    """
    wanted: Wanted = "last" if scalar else "next"
    width = 1 if scalar else rows.responses.shape[1]
    packed = pack_micro_batch(
        rows, picked, share_prefix=share_prefix, packs_rows=packs_rows, wanted=wanted, device=_CPU, group=group
    )
    (flat,) = packed.join((module(packed) if scalar else module(packed, 1.0, False).log_prob,))
    values = packed.unpack(flat.float())
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


# ---------------------------------------------------------------------------------------------- what a difference says


def largest(difference: Tensor) -> float:
    """Return the largest absolute number; infinity where one is none."""
    return float(difference.detach().abs().nan_to_num(torch.inf).max())


def gradient_difference(packed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> float:
    """Return the largest norm of a gradient's difference, relative to the norm of the model's own gradient."""
    # A gradient that consists of rounding is compared with the largest one.
    floor = 1e-2 * max((float(g.norm()) for g in own.values()), default=1.0)
    worst = 0.0
    for name in {*packed, *own}:
        one, other = packed.get(name), own.get(name)
        apart = one - other if one is not None and other is not None else (one if other is None else other)
        assert apart is not None  # the name is in one of the two
        size = 0.0 if other is None else float(other.norm())
        worst = max(worst, float(apart.norm().nan_to_num(torch.inf)) / max(size, floor))
    return worst


def _cause_of_values(
    result: ProbeResult, apart: Tensor, tolerance: float, own: PreTrainedModel, module: nn.Module, rows: TokenRows
) -> str:
    if not result.packs_rows and max(result.packing_difference, result.difference) > tolerance:
        return (
            "on rows that are padded on the right, each by itself, its own forward computes something else than on the "
            "row alone: it is not causal, or a choice that it makes depends on the other tokens of a micro-batch"
        )
    if result.packing_difference > tolerance:
        return (
            "the values of a sequence depend on the other rows of its micro-batch: recurrent or convolutional state "
            "that crosses rows, or positions that are counted over the whole packed row"
        )
    if result.difference > tolerance:
        if _same_hidden_states(own, module, rows):
            return "its head does something to the logits that the packed log-prob does not (a scale, a bias, a cap)"
        if apart.shape[1] > 1 and largest(_before(apart, rows)) <= tolerance < result.difference:
            return (
                f"an attention mask that changes after some tokens ({CROSSED_TOKENS} in this comparison), such as a "
                "sliding window or chunks, which packed attention is not told of"
            )
        return (
            "its attention has a mask, a bias, a cap or positions of its own, which packed attention does not have, or "
            "it reads the packed row as one sequence"
        )
    return ""


def _before(apart: Tensor, rows: TokenRows) -> Tensor:
    """Return the differences at tokens with a context of at most `CROSSED_TOKENS`, 0 elsewhere."""
    positions = torch.tensor([len(prompt) for prompt in rows.prompts])[:, None] + torch.arange(apart.shape[1])[None]
    return torch.where(positions <= CROSSED_TOKENS, apart, 0.0)


@torch.no_grad()
def _same_hidden_states(own: PreTrainedModel, module: Any, rows: TokenRows) -> bool:
    """Return whether the backbones agree, so that the difference is the head's."""
    tokens = _sequence(rows, 0)
    packed = pack_micro_batch(rows, (0,), share_prefix=False, wanted="next", device=_CPU)
    try:
        alone = own.base_model(input_ids=tokens).last_hidden_state[0, len(rows.prompts[0]) - 1 : -1]
        return bool(torch.allclose(alone, module.hidden_states(packed), rtol=1e-3, atol=1e-3))
    except FAILURES:
        return False


@torch.no_grad()
def _rounding(own: PreTrainedModel, cut: PretrainedConfig, family: Family, rows: TokenRows, values: Tensor) -> float:
    """Return the largest change of the model's own values when each weight moves by one rounding of float32."""
    moved = family.build(cut)
    moved.load_state_dict(own.state_dict())
    fix_rope_frequencies(moved, UNREACHED_TOKENS)
    for parameter in moved.parameters():
        parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter).sign())
    return largest(plain_values(moved, rows, family.is_scalar) - values)


def _why_not_packed(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "it does not take another attention than its own"
    if isinstance(error, ValueError):  # from packed attention, masks or head, whose messages say what is wanted
        return str(error)
    return f"its packed forward fails ({first_line(error)})"


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
