"""A plugin of SGLang 0.5.23 by which `--enable-deterministic-inference` starts on a CPU.

SGLang refuses it beside torch's own attention, and gives it products by Triton, which a CPU has not. Without it a
request's seed is not looked at. Here nothing else of it is left than that: products are torch's.

    pip install sglang==0.5.23 --no-deps       # in an environment with hrl, whose torch stays
    pip install --no-deps triton torchvision orjson blobfile distro easydict modelscope openai-harmony outlines \
        scipy zstandard soundfile
    PYTHONPATH=.:tests/first_light/sglang_on_cpu SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 \
        python -m tests.first_light --stage sglang --device cpu --tiny

With a torch for CPUs, torchvision's wheel from PyPI can be imported once its `_meta_registrations.py` is emptied.
"""

from __future__ import annotations


def apply() -> None:
    """Called by SGLang in each of its processes, by the entry point beside this file."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native", "intel_amx"])  # the latter becomes the former
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
