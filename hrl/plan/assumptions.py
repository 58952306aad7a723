"""Everything that the model of cost assumes about software, by name, with unit and source.

Times of a GPU were not measured with hrl, which has not run on one; docs/scaling.md compares what they lead to with
figures that others have published. Those of a CPU follow from a few measured figures, listed on that page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Constants of a kind of hardware.

    Attributes:
        prefill_share: Share of the peak FLOP/s that an engine reaches in prefills.
        decode_share: The same of decoding, where products are narrow.
        memory_share: Share of the peak rate of memory that reading weights and cache reaches.
        engine_step_s: Seconds of an engine's iteration beside products and memory: scheduling, launches, output.
        engine_row_s: The same for each running request.
        block_tokens: Tokens of a block of the cache; samples share whole blocks of their prompt.
        wave_s: Seconds of a batch beside its iterations: requests are handed over, answers taken apart.
        turn_s: Processor seconds of the episode service for a turn: templates, parsing, routing.
        sampler_passes: How often the sampler reads or writes a request's float32 logits.
        expert_share: What products of experts reach of what dense ones reach.
        allreduce_s: Seconds of an all-reduce of a few bytes among the ranks of an engine.
        collective_share: Share of the rate of links that large all-gathers and reductions reach.
        hop_s: Seconds for which a ring of ranks passes a message on once; an all-gather has one for each rank.
        overlap: Share of a pass behind which its collectives can hide.
        imbalance: Tokens of the fullest rank over the mean; the planner stops at this (`hrl.batching.planner`).
        pass_s: Seconds of a pass beside its products: packing, the last statistics, waiting for the slowest rank.
        optimizer_bytes: Bytes of memory that an optimizer step moves for a parameter: norm, clipping, AdamW, casts.
        driver_hop_s: Seconds of the driver for a phase, beside rows and ranks.
        driver_token_s: Seconds that the driver packs, sends and unpacks a token of a batch in a phase.
        driver_rank_s: Seconds that the driver spends on a rank in a phase.
        advantage_token_s: Seconds that the driver computes the advantage of a token.
        sync_s: Seconds of a weight sync beside bytes and tensors: control messages, reset of the prefix cache.
        sync_tensor_s: Seconds to announce, load and confirm a tensor.
        sync_bytes: Bytes of memory that a sync moves for a weight: cast, checksum, copies, load, read-back.
        sleep_s: Seconds for an engine to go to sleep and wake up.
    """

    prefill_share: float
    decode_share: float
    memory_share: float
    engine_step_s: float
    engine_row_s: float
    block_tokens: float
    wave_s: float
    turn_s: float
    sampler_passes: float
    expert_share: float
    allreduce_s: float
    collective_share: float
    hop_s: float
    overlap: float
    imbalance: float
    pass_s: float
    optimizer_bytes: float
    driver_hop_s: float
    driver_token_s: float
    driver_rank_s: float
    advantage_token_s: float
    sync_s: float
    sync_tensor_s: float
    sync_bytes: float
    sleep_s: float


# Of the driver, the same on any machine: hops of 1,024 rows, 885,000 tokens, took 23, 40, 195 and 539 ms with 8, 64,
# 512 and 1,024 ranks in one run of `make bench`, and 24, 46, 202 and 311 in the next.
_DRIVER_HOP_S, _DRIVER_TOKEN_S, _DRIVER_RANK_S, _ADVANTAGE_TOKEN_S = 5e-3, 15e-9, 0.42e-3, 15e-9
_IMBALANCE = 1.02
_TURN_S = 0.51e-3

ON_GPU = Assumptions(
    prefill_share=0.50,  # a guess: less than training, whose batches are larger
    decode_share=0.40,  # a guess; it matters only where hundreds of requests run
    memory_share=0.70,  # 72B on two H100: 31.0 ms a token where the weights alone take 21.7 (tt-inference-server #143)
    engine_step_s=2e-3,  # a guess: vLLM with CUDA graphs and asynchronous scheduling
    engine_row_s=10e-6,  # a guess; hrl's own share is 2.4 µs (docs/status.md)
    block_tokens=16,  # vLLM's default
    wave_s=0.5,  # a guess
    turn_s=_TURN_S,  # 1,000 episodes of 6 turns with a scripted engine (docs/status.md)
    sampler_passes=5,  # counted in vLLM 0.32's second runner: one write of the logits, four reads
    expert_share=0.50,  # a guess
    allreduce_s=10e-6,  # a guess: vLLM's own kernel over NVLink
    collective_share=0.80,  # a guess: NCCL on large messages
    hop_s=2e-6,  # a guess: between NVLink's 1 and a network's 5 µs
    overlap=0.90,  # a guess: FSDP gathers the next layer while one runs; the first waits
    imbalance=_IMBALANCE,  # hrl.batching.planner
    pass_s=0.1,  # a guess
    optimizer_bytes=48,  # counted: norm 4, clipping 8, AdamW 16 read and 12 written, cast 4 and 2, zeroing
    driver_hop_s=_DRIVER_HOP_S,  # hops of 1,024 rows to 8, 64, 512 and 1,024 ranks: 23, 40, 195, 539 ms
    driver_token_s=_DRIVER_TOKEN_S,  # the same
    driver_rank_s=_DRIVER_RANK_S,  # the same
    advantage_token_s=_ADVANTAGE_TOKEN_S,  # GAE of 1,024 × 4,096 tokens: 64 ms, before it was compiled; it takes 12 ms
    sync_s=0.1,  # a guess
    sync_tensor_s=2e-4,  # a guess: a loop in Python over the names of a bucket
    sync_bytes=18,  # counted: cast 4 and 2, checksum 2, into the bucket 4, load 4, read-back 2
    sleep_s=3.0,  # vLLM's log: 1.5 s to fall asleep (trl #4086); as much is taken for waking up
)
# Figures of two cores with AVX512-BF16 (tests/plan/recorded.py) and what each has fixed, with products at 445 GFLOP/s
# and copies at 35 GB/s, which `this_machine` measures on them when nothing else runs.
ON_CPU = Assumptions(
    prefill_share=0.76,  # as decoding
    decode_share=0.76,  # 128 requests of 45 + 32 tokens: 179 ms for each of the 32
    memory_share=0.27,  # reading and writing beside products, of the rate of a copy alone
    engine_step_s=0.004,  # one such request: 33 ms
    engine_row_s=0.0,  # part of the sampler's
    block_tokens=32,  # hrl.workers.rollout.vllm_engine
    wave_s=0.6,  # sampling 64 responses of 12.3 tokens: 2.50 s
    turn_s=_TURN_S,  # 1,000 episodes of 6 turns with a scripted engine (docs/status.md)
    sampler_passes=18,  # sampling 128 responses of 20.6 tokens: 4.99 s
    expert_share=0.50,  # as on a GPU
    allreduce_s=1e-3,  # a guess
    collective_share=0.20,  # a guess
    hop_s=1e-4,  # a guess
    overlap=0.0,  # gloo's threads and torch's are on the same cores
    imbalance=_IMBALANCE,  # hrl.batching.planner
    pass_s=0.2,  # an update of 8 rows beside one of none
    optimizer_bytes=58,  # an update in which no row has an advantage: 0.83 s
    driver_hop_s=_DRIVER_HOP_S,  # hops of 1,024 rows to 8, 64, 512 and 1,024 ranks: 23, 40, 195, 539 ms
    driver_token_s=_DRIVER_TOKEN_S,  # the same
    driver_rank_s=_DRIVER_RANK_S,  # the same
    advantage_token_s=_ADVANTAGE_TOKEN_S,  # GAE of 1,024 × 4,096 tokens: 64 ms, before it was compiled; it takes 12 ms
    sync_s=0.1,  # as on a GPU
    sync_tensor_s=2e-4,  # as on a GPU
    sync_bytes=12,  # syncs of 269 MB in 272 tensors: 0.289 and 0.36 s
    sleep_s=0.0,  # engines do not sleep
)
