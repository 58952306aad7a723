"""Write a model that sees into `outputs/tiny_vl`: `python examples/tiny_vl.py`.

It is a Qwen2.5-VL of two layers with random weights, the family's own image processor, and a tokenizer made of the
texts of `bundled:shapes`. A picture of 64 × 64 pixels takes 16 tokens, one for each cell that a shape may stand in.
"""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hrl.data.tasks import bundled_rows

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}\
<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": ROPE}
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 512}
TOWER = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8, "window_size": 64}
NAMES = ("vision_start", "vision_end", "image", "video")


def save(folder):
    """Write it, the same weights each time, and return the folder."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = ["user\n", "assistant\n", *(row["prompt"][0]["content"] for row in bundled_rows("shapes/train"))]
    letters = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(texts, learner)
    ends = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "additional_special_tokens": SPECIAL[3:]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **ends)
    tokenizer.save_pretrained(folder)
    text = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **SHAPE, **HEADS, **ENDS}
    tokens = {f"{name}_token_id": number for number, name in enumerate(NAMES, start=3)}
    vision = {**SHAPE, **TOWER, "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    torch.manual_seed(1)
    transformers.AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 64**2, "longest_edge": 64**2}).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    save("outputs/tiny_vl")
