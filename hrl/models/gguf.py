r"""Convert a GGUF file of the Llama family into a folder of safetensors, configuration and tokenizer.

transformers can do this too (`from_pretrained(gguf_file=…)`), and a test compares the weights. This takes a third of
the time, because it reads the file once and builds no model. It also reads `tokenizer.ggml.pre`, which transformers
ignores: SmolLM's tokenizer splits digits off *before* the byte-level split, so that `"\n\n12"` is three tokens and not
four.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from hrl.errors import HrlError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedTokenizerBase

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


class GgufError(HrlError, ValueError):
    """A GGUF file can't be converted."""


def convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` into `folder` as bf16 safetensors, config, generation config, tokenizer and chat template.

    Raises:
        GgufError: The architecture, a tensor or the tokenizer is of an unknown kind.
    """
    from gguf import GGUFReader
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(source)
    fields = _read_fields(reader)
    if fields["general.architecture"] != "llama":
        raise GgufError(f"{source.name}: architecture {fields['general.architecture']!r}, expected 'llama'")
    weights = {hf_name(t.name): _to_bf16(t, fields) for t in reader.tensors}
    special = {f"{name}_token_id": int(fields[f"tokenizer.ggml.{name}_token_id"]) for name in ("bos", "eos")}
    special["pad_token_id"] = int(fields["tokenizer.ggml.padding_token_id"])
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=int(fields["llama.vocab_size"]),
        hidden_size=int(fields["llama.embedding_length"]),
        intermediate_size=int(fields["llama.feed_forward_length"]),
        num_hidden_layers=int(fields["llama.block_count"]),
        num_attention_heads=int(fields["llama.attention.head_count"]),
        num_key_value_heads=int(fields["llama.attention.head_count_kv"]),
        max_position_embeddings=int(fields["llama.context_length"]),
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings="lm_head.weight" not in weights,
        **special,
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    tokenizer = build_tokenizer(fields)
    _check_tokenizer(tokenizer, fields)
    tokenizer.save_pretrained(folder)


def hf_name(gguf_name: str) -> str:
    """Return the name in transformers of a GGUF tensor.

    `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.
    """
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    raise GgufError(f"unknown tensor {gguf_name!r} in a llama GGUF file")


def build_tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the byte-level BPE tokenizer that the file's `tokenizer.*` fields describe, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (kind, pre) != ("gpt2", "smollm"):
        raise GgufError(f"unknown tokenizer {kind!r} with pre-tokenizer {pre!r}, expected 'gpt2' with 'smollm'")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=int(fields["llama.context_length"]),
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> None:
    """Check the tokenizer against the file: ids of all tokens, the end token, and a chat that survives."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if len(tokenizer) != len(tokens) or tokenizer.convert_tokens_to_ids(tokens) != list(range(len(tokens))):
        raise GgufError("the tokenizer's vocabulary differs from the file's tokenizer.ggml.tokens")
    if tokenizer.eos_token_id != fields["tokenizer.ggml.eos_token_id"]:
        raise GgufError(
            f"the tokenizer's end token is {tokenizer.eos_token_id}, the file's {fields['tokenizer.ggml.eos_token_id']}"
        )
    chat = [{"role": "user", "content": "What is 7 + 5?"}, {"role": "assistant", "content": "12"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.decode(ids) != text or ids.count(tokenizer.eos_token_id) < len(chat):
        raise GgufError(
            f"the chat template's text does not survive encoding: {text!r} became {tokenizer.decode(ids)!r}"
        )


def _read_fields(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _to_bf16(tensor: ReaderTensor, fields: Mapping[str, Any]) -> torch.Tensor:
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        values = _to_half_split_rotary(values, int(fields["llama.attention.head_count"]))
    elif tensor.name.endswith("attn_k.weight"):
        values = _to_half_split_rotary(values, int(fields["llama.attention.head_count_kv"]))
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def _to_half_split_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection `(H * D, E)` from rotating neighbours to rotating halves.

    GGUF places the two coordinates that a rotary frequency turns side by side: (0, 1), (2, 3), …; transformers places
    them half a head apart: (0, D/2), (1, D/2+1), ….
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
