"""A reward model with a tokenizer and a chat template of its own gets the chats, not the policy's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.data.chat import ChatTemplateError
from hrl.data.other_reader import OtherReader, reads_the_same
from hrl.data.steps import StepMarks
from hrl.protocol import DataProto
from hrl.trainer.ppo.reward_model_rows import RewardModelRowError, RewardModelRows, packed_rows
from hrl.workers.requests import ScalarRequest
from hrl.workers.step_model import StepModel
from tests.models.tiny import fsdp_config, model_config
from tests.workers.asked import Critic
from tests.workers.engine.ranks import CPU

pytestmark = pytest.mark.usefixtures("world")

SPECIAL = ["<pad>", "<s>", "<end>"]
TEMPLATE = "{{ bos_token }}{% for message in messages %}<s>{{ message.role }}: {{ message.content }}<end>{% endfor %}"
SAID = [("What is 7 + 5?", ["It is 12.", "12", "twelve, I think"]), ("Name a fruit.", ["apple", "an apple", ""])]
LIMITS = MicroBatchLimits(64, None, "reward.reward_model.max_token_len_per_gpu")


def tokenizer_of(text: str, template: str | None, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows these words best."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<end>", pad_token=pad)
    made.chat_template = template
    return made


POLICY = tokenizer_of("What is the number? I think it is an apple.", TEMPLATE)


def sampled(tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """Answers to prompts as a policy gives them, ended by its end token."""
    asked = [(uid, prompt, answer) for uid, (prompt, answers) in enumerate(SAID) for answer in answers]
    tokens = [[*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id] for *_, answer in asked]
    width = max(map(len, tokens))
    lengths = torch.tensor(list(map(len, tokens)))
    mask = (torch.arange(width) < lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(asked), 1, dtype=torch.int64),
            "responses": torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in tokens]),
            "attention_mask": torch.cat([torch.ones(len(asked), 1, dtype=torch.int64), mask], 1),
            "response_mask": mask,
        },
        non_tensors={
            "uid": np.array([uid for uid, *_ in asked], dtype=object),
            "sample_index": np.array([0, 1, 2] * len(SAID), dtype=object),
            "raw_prompt": np.fromiter(
                ([{"role": "user", "content": prompt}] for _, prompt, _ in asked), dtype=object, count=len(asked)
            ),
        },
    )


def chat_of(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def classifier_of(folder: Path, tokenizer: PreTrainedTokenizerFast, *, positions: int = 64, width: int = 32) -> Path:
    """A random reward model with its tokenizer, as they are published."""
    torch.manual_seed(3)
    shape = {"hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **shape,
        initializer_range=0.15,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=positions,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def language_model_of(folder: Path, tokenizer: PreTrainedTokenizerFast, *, positions: int = 64) -> Path:
    """A random language model that judges steps by a word, with its tokenizer."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), **shape, initializer_range=0.15, max_position_embeddings=positions)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pad", ["<pad>", "<end>"])
def test_scores_are_those_of_transformers_for_the_chats(tmp_path: Path, pad: str) -> None:
    """`pad=<end>` also ends an answer: transformers then reads the score one token earlier, and so does hrl."""
    folder = classifier_of(tmp_path, tokenizer_of("Sums and fruits are twelve and 12.", TEMPLATE, pad))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    want = []
    for prompt, answers in SAID:
        for answer in answers:
            text = tokenizer.apply_chat_template(chat_of(prompt, answer), tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                want.append(model(ids).logits[0, 0])
    made = RewardModelRows(POLICY, OtherReader(tokenizer, tokenizer.pad_token_id, 64))
    rows, places = made.of(sampled(POLICY), LIMITS)
    assert places.tolist() == list(range(6)) and len({*map(float, want)}) == 6
    frozen = Critic(model_config(folder), None, fsdp_config(), device=CPU, total_steps=None)
    plan = Planner(share_prefix=True).forward(rows, 1, LIMITS)
    mine = rows.select_idxs(list(plan.rows[0]))
    scores = torch.zeros(6).index_copy(
        0, torch.tensor(plan.rows[0]), frozen.scores(mine, plan.ranks[0]).batch["rm_scores"]
    )
    torch.testing.assert_close(scores, torch.stack(want).float(), rtol=1e-5, atol=1e-6)


def test_what_the_rows_of_a_group_begin_with_is_their_prompt() -> None:
    rows = packed_rows([[1, 2, 3, 4], [1, 2, 5], [7], [1, 2, 3], [1, 2]], np.array(["a", "a", "b", "c", "c"], object))
    width = rows.batch["prompts"].shape[1]
    mask = rows.batch["attention_mask"].bool()
    kept = [
        (row[:width][is_there[:width]].tolist(), row[width:][is_there[width:]].tolist())
        for row, is_there in zip(torch.cat([rows.batch["prompts"], rows.batch["responses"]], 1), mask, strict=True)
    ]
    assert kept == [([1, 2], [3, 4]), ([1, 2], [5]), ([7], []), ([1], [2, 3]), ([1], [2])]


def test_of_an_episode_the_last_row_is_scored_with_the_whole_conversation() -> None:
    chat = [*chat_of("What is 7 + 5?", "12"), {"role": "user", "content": "sure?"}]
    batch = sampled(POLICY).select_idxs([0, 1])
    batch.batch["turn_index"] = torch.tensor([0, 1])[:, None].expand(2, batch.batch["responses"].shape[1])
    batch.batch["rollout_versions"] = torch.zeros_like(batch.batch["responses"])
    batch.non_tensor_batch |= {
        "branch": np.array([0, 1], dtype=object),
        "messages": np.fromiter([chat, chat], dtype=object, count=2),
    }
    other = tokenizer_of("Sums", TEMPLATE)
    rows, places = RewardModelRows(POLICY, OtherReader(other, None)).of(batch, LIMITS)
    assert places.tolist() == [1]
    ids = rows.batch["attention_mask"].bool()
    tokens = torch.cat([rows.batch["prompts"], rows.batch["responses"]], 1)[ids].tolist()
    assert other.decode(tokens) == other.apply_chat_template(chat, tokenize=False)


def test_what_a_reward_model_can_not_read_is_told_by_sample() -> None:
    other, batch = tokenizer_of("Sums", TEMPLATE), sampled(POLICY)
    with pytest.raises(
        RewardModelRowError, match=r"^uid 0, sample 2: the chat has (\d+) tokens .* it has 20 positions"
    ):
        RewardModelRows(POLICY, OtherReader(other, None, 20)).of(batch, LIMITS)
    few = MicroBatchLimits(16, None, "reward.reward_model.max_token_len_per_gpu", ranks=2)
    with pytest.raises(
        RewardModelRowError, match=r"hold 16: set reward.reward_model.max_token_len_per_gpu to at least"
    ):
        RewardModelRows(POLICY, OtherReader(other, None)).of(batch, few)
    refuses = tokenizer_of("Sums", "{{ raise_exception('no chats here') }}")
    with pytest.raises(ChatTemplateError, match="can't render chat 0 of the batch: no chats here"):
        RewardModelRows(POLICY, OtherReader(refuses, None)).of(batch, LIMITS)
    plain = OtherReader(tokenizer_of("Sums", None), None)
    assert plain.tokenizer.decode(plain.token_ids([chat_of("a", "b")])[0]) == "ab"
    with pytest.raises(ChatTemplateError, match="more than a text and its answer"):
        plain.token_ids([[*chat_of("a", "b"), *chat_of("a", "b")]])


STEPS = ["7 + 5\n\nis 12", "twelve", "", "It is\n\n7 and 5\n\nso <s> 12 \n\n"]


def answers(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> DataProto:
    """One prompt's answers, each ended by the end token."""
    tokens = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    width = max(map(len, tokens))
    mask = (torch.arange(width) < torch.tensor([len(ids) for ids in tokens])[:, None]).long()
    chats = [[{"role": "user", "content": "7 + 5?"}] for _ in texts]
    return DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in tokens]),
            "attention_mask": torch.cat([torch.ones(len(texts), 1, dtype=torch.int64), mask], 1),
            "response_mask": mask,
        },
        non_tensors={
            "uid": np.array(["u"] * len(texts), dtype=object),
            "sample_index": np.arange(len(texts)).astype(object),
            "raw_prompt": np.fromiter(chats, dtype=object, count=len(texts)),
        },
    )


@pytest.mark.parametrize("words", [None, ("+", "-")])
def test_each_step_has_the_probability_that_transformers_gives_it_at_its_token(
    tmp_path: Path, words: tuple[str, str] | None
) -> None:
    """A token classifier of two labels, and a language model of two words.

    The token that marks steps is `<pad>`; that of the template is another one.
    """
    tokenizer = tokenizer_of("7 and 5 are twelve\n\n", TEMPLATE)
    mark = StepMarks.of(tokenizer, "<pad>", "\n\n", words)
    frozen: Any
    if words is None:
        torch.manual_seed(5)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(tokenizer), **shape, initializer_range=0.15, num_labels=2)
        LlamaForTokenClassification(config).save_pretrained(tmp_path)
        model = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64)
        right_and_wrong = [1, 0]
        frozen = Critic(model_config(tmp_path), None, fsdp_config(), device=CPU, total_steps=None)
    else:
        language_model_of(tmp_path, tokenizer)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        right_and_wrong = tokenizer.convert_tokens_to_ids(["+", "-"])
        frozen = StepModel(model_config(tmp_path), fsdp_config(), device=CPU)
    batch = answers(POLICY, STEPS)
    steps = RewardModelRows(POLICY, OtherReader(tokenizer, None), mark).of_steps(batch, LIMITS)
    plan = Planner(share_prefix=True).forward(steps.rows, 1, LIMITS)
    order = list(plan.rows[0])
    request = ScalarRequest(plan=plan.ranks[0], reward_ids=mark.reward_ids)
    found = frozen.compute_step_scores(steps.rows.select_idxs(order), request).batch["rm_step_scores"]
    scores = torch.zeros_like(found).index_copy(0, torch.tensor(order), found)
    placed, means = steps.place(scores, batch.batch["responses"].shape[1])

    shown = ["7 + 5<pad>\n\nis 12<pad>", "twelve<pad>", "", "It is<pad>\n\n7 and 5<pad>\n\nso  12<pad> \n\n"]
    written = [["7 + 5", "7 + 5\n\nis 12"], ["twelve"], [], ["It is", "It is\n\n7 and 5", "It is\n\n7 and 5\n\nso  12"]]
    for row, (text, ends) in enumerate(zip(shown, written, strict=True)):
        ids = tokenizer(
            tokenizer.apply_chat_template(chat_of("7 + 5?", text), tokenize=False), add_special_tokens=False
        )
        ids = torch.tensor([ids.input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, ids[0] == mark.token_id][:, right_and_wrong]
            right = logits.softmax(-1)[:, 0]
        tokens = batch.batch["responses"][row].tolist()
        columns = placed[row].nonzero().flatten().tolist()
        assert len(columns) == len(ends) == len(right)
        torch.testing.assert_close(placed[row, columns], right.float(), rtol=1e-5, atol=1e-6)
        for column, end in zip(columns, ends, strict=True):
            until, before = (POLICY.decode(tokens[:stop], skip_special_tokens=True) for stop in (column + 1, column))
            assert len(until) >= len(end) > len(before)
        assert float(means[row]) == pytest.approx(float(right.mean()) if len(right) else 0.0, rel=1e-5)


def test_a_template_that_takes_the_marks_away_is_told() -> None:
    tokenizer = tokenizer_of("7", "{% for m in messages %}{{ m.content | replace('<pad>', '') }}{% endfor %}")
    marks = StepMarks.of(tokenizer, "<pad>", "\n\n", None)
    with pytest.raises(RewardModelRowError, match="uid u, sample 0: .* template leaves 0 of the 2 tokens <pad>"):
        RewardModelRows(POLICY, OtherReader(tokenizer, None), marks).of_steps(answers(POLICY, STEPS), LIMITS)


def test_tokenizers_read_the_same_with_one_vocabulary_and_no_second_template() -> None:
    def changed(**changes: Any) -> PreTrainedTokenizerFast:
        return tokenizer_of(**{"text": "Sums", "template": TEMPLATE} | changes)

    assert reads_the_same(changed(), changed())
    assert reads_the_same(changed(), changed(template=None))
    assert not reads_the_same(changed(), changed(text="other words"))
    assert not reads_the_same(changed(), changed(template=TEMPLATE + " "))
