"""Rules of engines: what can't work is refused, and what does nothing is told."""

from __future__ import annotations

import pytest

from hrl.config.rules import warnings
from tests.config.refusals import names, require_refused, validate

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
HERE = "http://127.0.0.1:8000"


def served(name: str = "server", *urls: str, **others: object) -> dict[str, object]:
    """Keys of a run that samples from servers; other keys are those of `rollout.server`."""
    keys: dict[str, object] = {f"{ROLLOUT}.name": name, f"{ROLLOUT}.server.urls": list(urls or [HERE])}
    return keys | {f"{ROLLOUT}.server.{key}": value for key, value in others.items()}


CASES = [
    (
        {f"{ROLLOUT}.name": "server"},
        f"{ROLLOUT}.name is server, whose servers are started by somebody else, and {ROLLOUT}.server.urls names none.",
    ),
    ({f"{ROLLOUT}.server.urls": [HERE]}, f"{ROLLOUT}.server.urls has addresses, and {ROLLOUT}.name is vllm, which"),
    (served("server", "127.0.0.1:8000"), "has '127.0.0.1:8000', which is no address. Write http://host:port."),
    (served("server", "ftp://127.0.0.1:8000"), "which is no address."),
    (served("server", "http://127.0.0.1:eighty"), "which is no address."),
    (served("server", "http://me:word@127.0.0.1:8000"), "has an address with a login, a query or a fragment in it."),
    (served("server", HERE, f"{HERE}/v1/"), f"{ROLLOUT}.server.urls names a server twice."),
    (
        served("server", "http://10.0.0.5:8000"),
        f"{ROLLOUT}.server.weights_folder is null, and http://10.0.0.5:8000 is not on this machine, whose memory",
    ),
    (served("sglang"), f"{ROLLOUT}.server.weights_folder needs a value, because {ROLLOUT}.name is sglang"),
    (served(api_key="sk-123"), f"{ROLLOUT}.server.api_key is not env:NAME; written out, it would be saved"),
    (
        served() | {f"{ROLLOUT}.engine_kwargs": {"server": {"seed": 1}}},
        f"{ROLLOUT}.engine_kwargs.server has arguments, and {ROLLOUT}.name is server, whose servers have those",
    ),
    (
        served()
        | {"trainer.resource_pools": {"a": [1], "b": [1]}, "trainer.role_pools": {"actor": "a", "rollout": "b"}},
        f"trainer.role_pools.rollout names a pool, and {ROLLOUT}.name=server: the servers are not in the run's",
    ),
    (
        served()
        | {
            "trainer.role_pools": {"actor": None, "rollout": "global"},
            "trainer.total_training_steps": 0,
            "trainer.resume_mode": "disable",
        },
        f"trainer.role_pools.actor is null, and {ROLLOUT}.name=server: nobody would give the servers the weights",
    ),
    (served() | {f"{ACTOR}.router_replay.mode": "R3"}, "whose engines are not asked for the experts that tokens went"),
    ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p is 0.9, and {ROLLOUT}.name is sglang"),
    (
        {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.top_k": 20},
        "log-probs among all tokens, not among these. Set it to -1",
    ),
    (
        {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2},
        f"{ROLLOUT}.tensor_model_parallel_size is 2, which the sglang engine can't do.",
    ),
    (
        served() | {f"{MODEL}.lora_rank": 8},
        f"{MODEL}.lora.merge is false, and {ROLLOUT}.name=server, whose engines get whole",
    ),
    (
        {
            f"{MODEL}.load_in_4bit": True,
            f"{MODEL}.lora_rank": 8,
            f"{ROLLOUT}.engine_kwargs": {"vllm": {"load_format": "safetensors"}},
        },
        f"engine_kwargs sets vLLM's load_format, and with {MODEL}.load_in_4bit the engine rounds weights as it loads",
    ),
    ({f"{ROLLOUT}.max_model_len": 600}, "prompt + response may be 1024"),
    (
        {f"{ROLLOUT}.enable_chunked_prefill": False, f"{ROLLOUT}.max_num_batched_tokens": 512},
        "Set it to at least 1024.",
    ),
    ({f"{ROLLOUT}.engine_kwargs": {"vlm": {}}}, "has 'vlm', which is not an engine with arguments. Did you mean vllm?"),
    ({f"{ROLLOUT}.engine_kwargs": {"swap_space": 4}}, "Write it as {vllm: {swap_space: ...}}."),
    (
        {f"{ROLLOUT}.engine_kwargs": {"vllm": {"tensor_parallel_size": 2}}},
        f"engine_kwargs sets vLLM's tensor_parallel_size. Set {ROLLOUT}.tensor_model_parallel_size.",
    ),
    (
        {f"{ROLLOUT}.engine_kwargs": {"vllm": {"enable_lora": False}}},
        f"engine_kwargs sets vLLM's enable_lora, which is fixed: an adapter is that of {MODEL}.lora_rank.",
    ),
    (
        {f"{ROLLOUT}.engine_kwargs": {"vllm": {"logprobs_mode": "raw_logprobs"}}},
        "sets vLLM's logprobs_mode, which is fixed: log-probs are those of the distribution that was sampled from.",
    ),
    (
        {f"{ROLLOUT}.engine_kwargs": {"vllm": {"quantization": "awq"}}},
        "vllm.quantization is awq, whose codes and scales lie in a folder; a sync brings weights in full precision.",
    ),
    (
        {f"{ROLLOUT}.dtype": "float32", f"{ROLLOUT}.engine_kwargs": {"vllm": {"quantization": "fp8"}}},
        f"{ROLLOUT}.dtype is float32, beside which vLLM has no kernel for fp8. Set it to bfloat16.",
    ),
    (
        {f"{ROLLOUT}.engine_kwargs": {"vllm": {"speculative_config": {"num_speculative_tokens": 4}}}},
        "vllm.speculative_config is {'num_speculative_tokens': 4}, which does not say what drafts. Write {",
    ),
    (
        {
            f"{ROLLOUT}.engine_kwargs": {
                "vllm": {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}}
            }
        },
        "rejection_sample_method accepts drafts at a given rate without asking the policy",
    ),
    (
        {
            f"{ROLLOUT}.engine_kwargs": {"vllm": {"speculative_config": {"method": "ngram"}}},
            f"{ACTOR}.router_replay.mode": "R3",
        },
        f"R3 would replay the experts of drafts that were not kept. Remove it, or set {ACTOR}.router_replay.mode to R2",
    ),
    ({f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.tensor_model_parallel_size": 2}, "which the hf engine can't do"),
]


@pytest.mark.parametrize(("given", "sentence"), CASES, ids=names(CASES))
def test_what_cannot_work_is_refused(given, sentence):
    require_refused(given, sentence)


@pytest.mark.parametrize(
    ("drafts", "is_told"),
    [({"method": "ngram"}, False), ({"model": "a/folder"}, True), ({"method": "mtp"}, True), (None, False)],
)
def test_drafts_whose_weights_no_sync_brings_are_a_warning(drafts, is_told):
    given = {f"{ROLLOUT}.engine_kwargs": {"vllm": {"speculative_config": drafts}}}
    told = [warning for warning in warnings(validate(given)) if "keeps the weights of its folder" in warning]
    assert bool(told) == is_told


def test_arguments_of_another_engine_than_the_chosen_one_are_a_warning():
    arguments = {"vllm": {"disable_custom_all_reduce": True}, "hf": {}}
    given = {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.engine_kwargs": arguments, "trainer.save_freq": 1}
    assert warnings(validate(given)) == [f"{ROLLOUT}.engine_kwargs.vllm has no effect while {ROLLOUT}.name is hf."]
