"""Run folders as a run leaves them, for tests of what reads them."""

from hrl.report.run_folder import RunFolder, json_line

#: Text that would do something, were it not treated as text.
HOSTILE = "<script>alert(1)</script></pre><img src=x onerror=alert(2)>[bold]{{ 7 * 7 }}\u202e\x1b[31m\x00"


def sample(number, score, **more):
    return {
        "prompt": f"<|user|>What is {number} + 2?<|assistant|>",
        "question": f"What is {number} + 2?",
        "response": f"it is {number + 2}",
        "response_length": 3 + number,
        "score": score,
        "reward_parts": {"exact": score},
        "finish_reason": "stop",
        "data_source": "sums",
        "ground_truth": str(number + 2),
        **more,
    }


def step_record(step, **more):
    return {"step": step, "reward/mean": step / 4, "timing_s/gen": float(step), "timing_s/step": 4.0, **more}


CONFIG = {
    "data": {"train_files": ["sums.jsonl"], "val_files": ["held_out.jsonl"], "train_batch_size": 8},
    "actor_rollout_ref": {
        "model": {"path": "some/model"},
        "actor": {"optim": {"lr": 2e-5}},
        "rollout": {"n": 4, "name": "vllm", "temperature": 1.0},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "trainer": {"experiment_name": "sums <1>", "total_training_steps": 3},
}


def started_run(path):
    """The folder of a run that has not made a step."""
    folder = RunFolder(path)
    folder.write_config(CONFIG)
    folder.write_environment()
    return folder


def finished_run(path):
    """Three steps, validated before the first and after the last; the best sample of the last step is hostile."""
    folder = started_run(path)
    records = [
        {"step": 0, "val/a/sums/mean@1": 0.25, "val/a/sums/n": 4.0},
        step_record(1),
        step_record(2, **{"timing_s/my_phase": 1.0}),
        step_record(3, **{"val/a/sums/mean@1": 0.75, "val/a/sums/n": 4.0, "timing_s/testing": 0.5}),
    ]
    folder.metrics_file.write_text("".join(map(json_line, records)))
    for step in (1, 2, 3):
        folder.write_rollouts(step, [sample(i, i / 4, advantage=(1.0, -1.0, 0.0)[i]) for i in range(3)])
    folder.write_rollouts(3, [sample(0, 0.0), sample(1, 0.5), sample(2, 1.0, response=HOSTILE)])
    folder.write_rollouts(0, [sample(i, 0.0, response="who knows") for i in range(2)], kind="val")
    folder.write_rollouts(3, [sample(0, 0.0, response="still not"), sample(1, 1.0, response=HOSTILE)], kind="val")
    folder.close()
    return folder.path
