"""Families of models: small real tokenizers with their special tokens, chat templates, and how their models write.

The templates in `templates/` do what the published ones are documented to do, as far as it concerns what is kept of a
chat when it goes on; they are written anew and much shorter. Sources are the models' cards and the templates in their
`tokenizer_config.json`: Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B-Instruct,
meta-llama/Llama-2-7b-chat-hf, microsoft/Phi-3-mini-4k-instruct,
mistralai/Mistral-7B-Instruct-v0.3, google/gemma-2-2b-it, google/gemma-3-4b-it, HuggingFaceTB/SmolLM2-135M-Instruct,
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B, deepseek-ai/DeepSeek-V3, and openai/gpt-oss-20b.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
Message = Mapping[str, Any]

#: How tiktoken's cl100k, and after it Llama 3, Qwen and others, split a text.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THINK = ("<think>", "</think>")
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


def corpus() -> list[str]:
    """Text to train tokenizers on; what it says has no part in any test."""
    return [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))] + [__doc__ or "", (json.__doc__ or "")]


def byte_level(special: Sequence[str], added: Sequence[str] = (), vocab_size: int = 700) -> Tokenizer:
    """A byte-level BPE, as tiktoken's."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return backend


def sentence_piece(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """A BPE over characters with bytes to fall back on, and spaces as `▁`, as Gemma's."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^▁\n]+|▁+|\n+"), behavior="isolated")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {token: len(vocab) + i for i, token in enumerate(model["vocab"])}
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return backend


def _mistral(version: str) -> tuple[models.BPE, list[str]]:
    """A model from a file that mistral-common brings, and its special tokens."""
    import sentencepiece
    from transformers.tokenization_utils_base import generate_merges

    spec = find_spec("mistral_common")
    assert spec is not None and spec.origin is not None
    (file,) = (Path(spec.origin).parent / "data").glob(f"*.model.{version}")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, generate_merges(vocab), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return model, [name for i, name in enumerate(names) if pieces.is_control(i)]


_SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def mistral_v3(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of Mistral-7B-Instruct-v0.3: a space is put before a text, but not behind a special token."""
    model, control = _mistral("v3")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(_SPACES)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return backend


def llama_2(special: Sequence[str], added: Sequence[str] = (), *, swallows: bool = False) -> Tokenizer:
    """Tokenizers as Llama 2's: a space is put before a text, and behind every special token.

    Args:
        special: Further special tokens.
        added: None.
        swallows: Whether special tokens take the white space behind them, as Phi-3's.
    """
    model, control = _mistral("v1")
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(_SPACES)
    names = dict.fromkeys([*control, *special])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=swallows) for t in names])
    return backend


def phi_3(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """Phi-3's, which has Llama 2's vocabulary."""
    return llama_2(special, added, swallows=True)


def smollm2(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of SmolLM2, from the model that comes with hrl."""
    from hrl.models.source import resolve_model

    return Tokenizer.from_file(str(resolve_model("bundled:smollm2-135m-instruct") / "tokenizer.json"))


class _Letters(PreTrainedTokenizer):
    """A tokenizer in Python, a token for each ASCII letter."""

    def __init__(self, **kwargs: Any) -> None:
        self._ids = {chr(code): code for code in range(128)} | {"<unk>": 128}
        super().__init__(unk_token="<unk>", **kwargs)

    vocab_size = 129

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 128)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index) if index < 128 else "<unk>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow_tokenizer(chat_template: str) -> PreTrainedTokenizerBase:
    """A tokenizer that doesn't say where its tokens stand, with ChatML's special tokens and those of thoughts."""
    tokenizer = _Letters(chat_template=chat_template)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in CHATML], special_tokens=True)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in THINK])
    return tokenizer


# ---- how models write -------------------------------------------------------------------------------------------


def said(message: Message) -> str:
    """A turn without tools and without a thought of its own."""
    return message["content"] or ""


def _json(call: Message, arguments: str = "arguments") -> str:
    function = call["function"]
    return f'{{"name": "{function["name"]}", "{arguments}": {json.dumps(function["arguments"], ensure_ascii=False)}}}'


def qwen(message: Message) -> str:
    thought = message.get("reasoning_content")
    calls = "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in message.get("tool_calls") or ())
    text = "\n".join(filter(None, [message["content"], calls]))
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought else text


def llama(message: Message) -> str:
    calls = message.get("tool_calls")
    return _json(calls[0], "parameters") if calls else said(message)


def llama_2_answer(message: Message) -> str:
    return f" {said(message)} "


def mistral(message: Message) -> str:
    calls = message.get("tool_calls")
    if not calls:
        return f" {said(message)}"
    written = (json.dumps(call["function"], ensure_ascii=False)[:-1] + f', "id": "{call["id"]}"}}' for call in calls)
    return f"[TOOL_CALLS] [{', '.join(written)}]"


def deepseek(message: Message) -> str:
    thought = message.get("reasoning_content")
    calls = [
        f"<｜tool▁call▁begin｜>{call['type']}<｜tool▁sep｜>{call['function']['name']}\n```json\n"
        f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for call in message.get("tool_calls") or ()
    ]
    text = "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>" if calls else said(message)
    return f"{thought}\n</think>\n\n{text}" if thought else text


def harmony(message: Message) -> str:
    thought = message.get("reasoning_content")
    before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    calls = message.get("tool_calls")
    if not calls:
        return f"{before}<|channel|>final<|message|>{said(message)}"
    function = calls[0]["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{before} to=functions.{function['name']}<|channel|>commentary json<|message|>{arguments}"


# ---- families ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model's tokenizer and template.

    Attributes:
        name: Of the template.
        tokenizer_of: Makes the tokenizer's backend.
        special: Special tokens, beginning with the one that ends the text.
        added: Added tokens that are not special.
        stop: Tokens at which sampling ends, beginning with the template's own.
        call_end: The token that ends a turn that calls tools, if it is another one.
        writes: The text of a turn as the model writes it, without the token that ends it.
        bos: Whether the template writes the second special token at the beginning.
        calls: Most calls of tools in a turn; 0 where the template has no tools.
    """

    name: str
    tokenizer_of: Callable[..., Tokenizer]
    special: tuple[str, ...]
    stop: tuple[str, ...]
    writes: Callable[[Message], str] = said
    added: tuple[str, ...] = ()
    bos: bool = False
    calls: int = 2
    call_end: str | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return _tokenizer(self)

    @property
    def stop_ids(self) -> list[int]:
        return [self.id(token) for token in self.stop]

    def render(self, messages: Sequence[Message], *, has_tools: bool | None = None) -> str:
        """A chat as text and ready for a turn, by the template alone."""
        chat = [_known(message, self.name) for message in messages]
        tools = {"tools": [TOOL]} if (bool(self.calls) if has_tools is None else has_tools) else {}
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **tools))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    def end(self, message: Message) -> str:
        """The token that ends this turn."""
        return self.call_end if self.call_end and message.get("tool_calls") else self.stop[0]

    def __hash__(self) -> int:
        return hash(self.name)


def _known(message: Message, family: str) -> Message:
    """A message as the family's template wants it, which is not always as a user would write it."""
    known = dict(message)
    if family.startswith("deepseek"):
        known["tool_calls"] = [
            {
                **call,
                "function": call["function"]
                | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
            }
            for call in known.get("tool_calls") or ()
        ]
    if family == "gpt_oss":
        known["thinking"] = known.get("reasoning_content")
    return known


@cache
def _tokenizer(family: Family) -> PreTrainedTokenizerBase:
    bos = {"bos_token": family.special[1]} if family.bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=family.tokenizer_of(family.special, family.added),
        eos_token=family.special[0],
        chat_template=(TEMPLATES / f"{family.name}.jinja").read_text(),
        clean_up_tokenization_spaces=False,
        **bos,
    )


CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL = LLAMA_2 = ("</s>", "<s>")
PHI = ("<|endoftext|>", "<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
GEMMA = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_ADDED = (
    *THINK,
    *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{part}｜>" for part in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
)
HARMONY = ("<|return|>", "<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|constrain|>")

FAMILIES = {
    family.name: family
    for family in (
        Family("smollm2", smollm2, CHATML, CHATML[:1], calls=0),
        Family("qwen2_5", byte_level, CHATML, CHATML[:2], qwen, TOOL_TAGS),
        Family("qwen3", byte_level, CHATML, CHATML[:2], qwen, (*TOOL_TAGS, *THINK)),
        Family("llama3_1", byte_level, LLAMA, ("<|eot_id|>", "<|eom_id|>"), llama, bos=True, calls=1),
        Family("llama2", llama_2, LLAMA_2, LLAMA_2[:1], llama_2_answer, bos=True, calls=0),
        Family("phi3", phi_3, PHI, ("<|end|>", "<|endoftext|>"), bos=True, calls=0),
        Family("mistral", mistral_v3, MISTRAL, MISTRAL[:1], mistral, bos=True),
        Family("gemma2", sentence_piece, GEMMA, ("<end_of_turn>", "<eos>"), bos=True, calls=0),
        Family("gemma3", sentence_piece, GEMMA, ("<end_of_turn>", "<eos>"), bos=True, calls=0),
        Family("deepseek_r1", byte_level, DEEPSEEK, DEEPSEEK[:1], deepseek, DEEPSEEK_ADDED, bos=True),
        Family("deepseek_v3", byte_level, DEEPSEEK, DEEPSEEK[:1], deepseek, DEEPSEEK_ADDED, bos=True),
        Family("gpt_oss", byte_level, HARMONY, ("<|return|>", "<|call|>"), harmony, calls=1, call_end="<|call|>"),
    )
}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefgh0", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "look_up", "tool_call_id": "abcdefgh0"}


def control_ids(family: Family) -> set[int]:
    """Special tokens, and what the template writes as markup."""
    added = family.tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.special or token.content in family.tokenizer.chat_template}
