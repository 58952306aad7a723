"""Speculative decoding: what is kept of a draft, and a real vLLM engine that samples as if there were none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import sample_seed
from hrl.workers.rollout.drawing import Ahead, Positions, draw, seeded_number
from hrl.workers.rollout.host import RolloutHost
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows, score

pytest.importorskip("vllm")
from vllm.v1.outputs import LogprobsTensors

from hrl.workers.rollout.vllm_speculation import DraftCounts, accepted, draw_every_place
from tests.workers.rollout.test_vllm_worker import OfGpu

pytestmark = pytest.mark.engine

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11] * 8, [3, 4] * 12, [*range(20, 44)]]
"""Most repeat themselves, so that there is always an n-gram to follow."""
N, R = 4, 40


def test_a_token_is_kept_while_the_drafts_before_it_are_what_was_drawn():
    sampled = torch.tensor([4, 5, 6, 7, 1, 2, 3, 9])  # rows of three drafts, none, two
    drafts = torch.tensor([4, 8, 6, 2, 3])

    tokens, places = accepted(sampled, drafts, [4, 1, 3])

    assert tokens.tolist() == [[4, 5, -1, -1], [1, -1, -1, -1], [2, 3, 9, -1]]
    assert places[tokens >= 0].tolist() == [0, 1, 4, 5, 6, 7]
    never = accepted(sampled, torch.tensor([-1, 5, 6, -1, 3]), [4, 1, 3])[0]  # what no draft was made for
    assert never.tolist() == [[4, -1, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1]]


def test_what_is_kept_is_what_a_loop_over_rows_keeps():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        widths = torch.randint(1, 6, (7,), generator=generator).tolist()
        sampled = torch.randint(3, (sum(widths),), generator=generator)
        drafts = torch.randint(3, (sum(widths) - len(widths),), generator=generator)
        tokens, places = accepted(sampled, drafts, widths)
        drawn, proposed = sampled.tolist(), drafts.tolist()
        for row, width in enumerate(widths):
            mine, theirs = [drawn.pop(0) for _ in range(width)], [proposed.pop(0) for _ in range(width - 1)]
            wrong = next((at for at in range(width - 1) if mine[at] != theirs[at]), width - 1)
            assert tokens[row].tolist() == mine[: wrong + 1] + [-1] * (max(widths) - wrong - 1)
        assert torch.equal(sampled[places][tokens >= 0], tokens[tokens >= 0])


def test_numbers_ahead_are_those_that_come_next_and_count_only_when_they_are_kept():
    generator, positions = torch.Generator().manual_seed(7), Positions()
    ahead = [positions.number(Ahead(generator, by)) for by in range(3)]
    assert ahead == [seeded_number(7, position) for position in range(3)]
    positions.count(generator, 2)  # a draft of two, the second of which was wrong
    assert positions.number(generator) == ahead[2] and positions.number(generator) == seeded_number(7, 3)


def test_a_generator_of_a_gpu_is_set_behind_what_was_kept_by_its_own_offset():
    """vLLM's rejection sampler of the first runner, as on a GPU: rows with drafts, without, without a seed."""
    from vllm.v1.sample.metadata import SamplingMetadata

    seeded, drawn = OfGpu(), []

    class Sampler:
        def __call__(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> Any:
            drawn.append(sampling_metadata)
            ids = torch.tensor([7, 8, 9, 1, 2, 3], dtype=torch.int32)[:, None]
            logprobs = LogprobsTensors(ids, ids / 10, torch.zeros(6, dtype=torch.int32))
            return SimpleNamespace(sampled_token_ids=ids, logprobs_tensors=logprobs)

    rejection = SimpleNamespace(sampler=Sampler())
    draw_every_place(rejection, Positions())
    sampling = sampling_metadata(3, {0: seeded}, temperature=torch.tensor([0.5, 1.0, 2.0]))
    metadata = SimpleNamespace(num_draft_tokens=[2, 0, 1], draft_token_ids=torch.tensor([7, 4, 2]))
    out = rejection.forward(metadata, None, torch.zeros(6, 16), sampling)

    assert out.sampled_token_ids.tolist() == [[7, 8, -1], [1, -1, -1], [2, 3, -1]]
    kept = out.logprobs_tensors.logprobs.flatten()[out.sampled_token_ids.flatten() >= 0]
    torch.testing.assert_close(kept, torch.tensor([0.7, 0.8, 0.1, 0.2, 0.3]))
    assert drawn[0].temperature.tolist() == [0.5, 0.5, 0.5, 1.0, 2.0, 2.0] and drawn[0].top_k is None
    assert drawn[0].generators == {place: Ahead(seeded, place) for place in range(3)}
    assert seeded.offset == 2 * 4  # two tokens were kept


def sampling_metadata(rows: int, generators: dict[int, Any], temperature: torch.Tensor) -> Any:
    """vLLM's, of requests without penalties."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(0)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["eagle", "ngram"])
def host(folder, tmp_path_factory, request) -> Iterator[RolloutHost]:
    drafts = {
        "eagle": {"model": str(models.save_eagle_head(tmp_path_factory.mktemp("eagle"), folder))},
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    arguments = {"method": request.param, "num_speculative_tokens": 4, **drafts[request.param]}
    tokens = TokenIds(1, (1,), models.VOCAB)
    changes: dict[str, Any] = {"dtype": "float32", "engine_kwargs": {"vllm": {"speculative_config": arguments}}}
    with RolloutHost(engine_setup("vllm", folder, tokens, 64, **changes)) as host:
        host.start()
        yield host


def test_tokens_and_log_probs_are_those_of_the_model_and_of_each_rows_seed_whatever_was_drafted(host, folder):
    """Every token is the one that the model's distribution and the seed's number of its place give, without drafts."""
    batch = prompt_batch(PROMPTS, n=N, width=24)
    original, changed = models.load(folder), models.perturb(models.load(folder), 0.5)
    for version, model in enumerate((original, changed)):
        if version:  # what drafts keeps the weights that it has, or needs none
            host.push_weights(version, models.specs(model, torch.float32), models.parameters(model))
        for temperature in (1.0, 0.3):
            assert host.take_counts() == {}
            out = sample_rows(host, batch, max_tokens=R, temperature=temperature)
            counts, mask = host.take_counts(), out.batch["response_mask"].bool()
            assert (
                0 < counts["rollout/accepted_tokens"] < counts["rollout/draft_tokens"] <= 4 * counts["rollout/drafts"]
            )

            logits = models.response_logits(model, out) / temperature
            exact = models.log_probs_at(logits, out, 1.0)
            torch.testing.assert_close(out.batch["rollout_log_probs"][mask], exact[mask], atol=1e-4, rtol=0.0)
            for row in range(len(out)):
                columns = out.non_tensor_batch
                seed = sample_seed(1, 1, columns["uid"][row], columns["sample_index"][row])
                length = int(mask[row].sum())
                numbers = torch.tensor([seeded_number(seed, position) for position in range(length)])
                drawn, _ = draw(logits[row, :length].clone(), numbers.double())
                assert torch.equal(drawn, out.batch["responses"][row, :length])


def test_greedy_answers_are_the_most_likely_tokens(host, folder):
    model = models.load(folder)
    host.push_weights(9, models.specs(model, torch.float32), models.parameters(model))
    out = sample_rows(host, prompt_batch(PROMPTS, n=1, width=24), max_tokens=R, temperature=0.0)
    mask, logits = out.batch["response_mask"].bool(), models.response_logits(model, out)
    assert torch.equal(logits.argmax(-1)[mask], out.batch["responses"][mask])
    torch.testing.assert_close(
        out.batch["rollout_log_probs"][mask], models.log_probs_at(logits, out, 1.0)[mask], atol=1e-4, rtol=0.0
    )
    assert host.take_counts()["rollout/accepted_tokens"] > 0
    assert DraftCounts().take() == {}


def test_an_engine_in_8_bits_has_after_a_sync_what_it_read_from_a_folder_of_those_weights(folder, tmp_path):
    """Bit for bit, by the log-probs of every place of a text: of the fresh engine, and after a way there and back."""
    other = models.perturb(models.load(folder), 0.5)
    models.load(folder).save_pretrained(tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    arguments = {"quantization": "fp8_per_channel", "speculative_config": drafts}
    changes: dict[str, Any] = {"dtype": "bfloat16", "engine_kwargs": {"vllm": arguments}}
    text = [*PROMPTS[0], *PROMPTS[3]]
    with RolloutHost(engine_setup("vllm", tmp_path, TokenIds(1, (1,), models.VOCAB), 64, **changes)) as quantised:
        quantised.start()
        fresh = score(quantised, text)
        original = models.load(folder)
        for version, (model, replaced) in enumerate(((other, original), (original, other)), 1):
            quantised.push_weights(version, models.specs(model, torch.bfloat16), models.parameters(model))
            synced = torch.tensor(score(quantised, text))
            of_new, of_old = ((synced - models.token_log_probs(each, text)).abs().mean() for each in (model, replaced))
            assert 0 < of_new < 0.3 * of_old
            assert (synced.tolist() == fresh) == (version == 2)
