"""Bad rows, bad configurations and bad rewards: each refused in time with its place, or left out as configured."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hrl.config import compose_cli
from hrl.errors import HrlError
from hrl.models.tokenizer import TokenIds, token_ids
from hrl.report.run_folder import read_metrics
from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.data.conftest import make_tokenizer
from tests.fuzz.config import BOMB
from tests.fuzz.rows import TABLE, checked, take
from tests.runs.in_process import in_process, run_configured

START_S, RUN_S = 60.0, 120.0
"""In which time a fault at the start, and one in a run, must have ended it."""
_SHOWN = 300


def refused(call: Callable[[], object], *told: str, within_s: float = START_S) -> Outcome:
    """Score something that must be refused with an error that has these words."""
    began = time.monotonic()
    try:
        call()
    except HrlError as error:
        seconds, message = time.monotonic() - began, str(error)
        missing = [word for word in told if word not in message]
        shown = " ".join(message.split())[:_SHOWN]
        if missing or seconds > within_s:
            return Outcome(1, seconds, f"lacks {missing} or came late: {shown}")
        return Outcome(2, seconds, shown)
    except BaseException as error:  # noqa: BLE001  # a traceback is what is looked for
        return Outcome(0, time.monotonic() - began, f"{type(error).__name__}: {error}"[:_SHOWN])
    return Outcome(0, time.monotonic() - began, "was taken")


def taken(call: Callable[[], str | None], within_s: float = START_S) -> Outcome:
    """Score something that must go well; what it returns is wrong with it, unless it is None."""
    began = time.monotonic()
    try:
        wrong = call()
    except BaseException as error:  # noqa: BLE001  # a traceback is what is looked for
        return Outcome(0, time.monotonic() - began, f"{type(error).__name__}: {error}"[:_SHOWN])
    seconds = time.monotonic() - began
    if wrong is not None or seconds > within_s:
        return Outcome(0, seconds, wrong or "came late")
    return Outcome(2, seconds, "goes on as it should")


# ---- files of rows ---------------------------------------------------------------------------------------------

GOOD = {"prompt": "1 + 1?", "answer": "2"}


def lines(*rows: object) -> bytes:
    """JSON lines: a text is one as it stands."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def bad_row(line: str | bytes, *told: str, good: int = 12) -> Callable[[Path], Outcome]:
    """One bad line after 12 good ones: refused with file and line, or left out and counted."""

    def inject(folder: Path) -> Outcome:
        path = folder / "rows.jsonl"
        bad = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
        path.write_bytes(lines(*[GOOD] * good) + bad + b"\n" + lines(GOOD))
        first = refused(lambda: take(str(path), "error"), f"rows.jsonl line {good + 1}", "data.bad_rows=skip", *told)
        if first.score < 2:
            return first
        then = taken(lambda: _skipped(path, good + 1))
        return first if then.score == 2 else then

    return inject


def _skipped(path: Path, kept: int) -> str | None:
    from hrl.data.dataset import RLHFDataset
    from tests.fuzz.rows import configuration, tokenizer

    rows = RLHFDataset(str(path), tokenizer(), configuration("ppo", "skip").data)
    wanted = {"data/dropped_bad": 1.0}
    return None if (len(rows), rows.metrics()) == (kept, wanted) else f"{len(rows)} rows, {rows.metrics()}"


def file_of(name: str, content: bytes | Callable[[], bytes], *told: str) -> Callable[[Path], Outcome]:
    """A file that can't be read as a whole, or a row in it that can't: refused with its name."""

    def inject(folder: Path) -> Outcome:
        path = folder / name
        path.write_bytes(content() if callable(content) else content)
        return refused(lambda: checked(str(path)), name, *told)

    return inject


def parquet(rows: Sequence[Any] = TABLE, **options: Any) -> bytes:
    """A Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink, **options)
    return sink.getvalue().to_pybytes()


def flipped(where: str) -> Callable[[], bytes]:
    """A Parquet file with sums of its pages, and flipped bytes in one of its parts."""

    def content() -> bytes:
        data = bytearray(parquet(TABLE * 10, write_page_checksum=True, compression="zstd"))
        column = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(0)
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        start = {
            "footer": footer + 20,
            "length of the footer": len(data) - 8,
            "dictionary": column.dictionary_page_offset + 30,
            "header of a page": column.data_page_offset,
            "data": column.data_page_offset + 40,
        }[where]
        for place in range(start, start + 4):
            data[place] ^= 0xA5
        return bytes(data)

    return content


def special(make: Callable[[Path], object], *told: str) -> Callable[[Path], Outcome]:
    """Something that is called a file of rows and is none."""

    def inject(folder: Path) -> Outcome:
        path = folder / "rows.jsonl"
        kept = make(path)
        outcome = refused(lambda: checked(str(path)), "rows.jsonl", *told)
        del kept
        return outcome

    return inject


def _socket(path: Path) -> socket.socket:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 characters
    try:
        made = socket.socket(socket.AF_UNIX)
        made.bind(path.name)
    finally:
        os.chdir(here)
    return made


def _mixed(folder: Path) -> Outcome:
    """Files of a folder with other columns and other types: rows are read one by one, so that they are taken."""
    (folder / "rows").mkdir()
    (folder / "rows" / "a.parquet").write_bytes(parquet(TABLE))
    (folder / "rows" / "b.parquet").write_bytes(parquet([{"prompt": [{"role": "user", "content": "hi"}], "answer": 2}]))
    both = taken(lambda: take(str(folder / "rows"), "error"))
    wrong = [{"prompt": 7.5, "answer": "2"}]
    (folder / "rows" / "c.parquet").write_bytes(parquet(wrong))
    outcome = refused(lambda: take(str(folder / "rows"), "error"), "c.parquet row 0", "'prompt' is 7.5")
    return outcome if both.score == 2 else both


def _late(folder: Path) -> Outcome:
    """A row of another type behind 50,000 good ones."""
    path = folder / "rows.jsonl"
    path.write_bytes(lines(GOOD) * 50_000 + lines({"prompt": 3}))
    return refused(lambda: take(str(path), "error"), "rows.jsonl line 50001", "'prompt' is 3")


def _long(folder: Path) -> Outcome:
    """A line of 100 MB: a row as any other, too long to be a prompt."""
    path = folder / "rows.jsonl"
    path.write_bytes(lines(GOOD) + b'{"prompt": "' + b"x" * 100_000_000 + b'"}\n')
    return refused(lambda: take(str(path), "error"), "rows.jsonl line 2", "a text of 100,000,000 characters")


def _without_filter(path: Path) -> None:
    from hrl.data.dataset import RLHFDataset
    from tests.fuzz.rows import configuration, tokenizer

    data = configuration("ppo", "error").data.model_copy(update={"filter_overlong_prompts": False})
    RLHFDataset(str(path), tokenizer(), data)


def _overlong(count: int, total: int) -> Callable[[Path], Outcome]:
    """Prompts over the limit: an error that names the first, or dropped, or cut; each counted."""

    def inject(folder: Path) -> Outcome:
        from hrl.data.dataset import RLHFDataset
        from tests.fuzz.rows import configuration, tokenizer

        path = folder / "rows.jsonl"
        path.write_bytes(lines(*[GOOD] * (total - count), *[{"prompt": "x" * 500}] * count))
        first = f"rows.jsonl line {total - count + 1} "
        outcome = refused(
            lambda: _without_filter(path), f"{count} prompts are longer", first, "filter_overlong_prompts"
        )
        if outcome.score < 2:
            return outcome
        data = configuration("ppo", "error").data
        cut = data.model_copy(update={"filter_overlong_prompts": False, "truncation": "left"})
        rows = RLHFDataset(str(path), tokenizer(), cut)
        if rows.metrics() != {"data/truncated": float(count)} or max(rows.lengths) > data.max_prompt_length:
            return Outcome(0, outcome.seconds, f"cut: {rows.metrics()}")
        if count == total:
            return refused(lambda: RLHFDataset(str(path), tokenizer(), data), "no row to use", f"{count} too long")
        rows = RLHFDataset(str(path), tokenizer(), data)
        dropped = {"data/dropped_overlong": float(count)}
        return outcome if rows.metrics() == dropped else Outcome(0, outcome.seconds, f"dropped: {rows.metrics()}")

    return inject


HUGE = "9" * 5000
ROW_FAULTS: dict[str, Callable[[Path], Outcome]] = {
    "half a character in the prompt": bad_row('{"prompt": "a\\ud800b"}', "'prompt' holds half a character"),
    "an integer of 5,000 digits": bad_row(
        f'{{"prompt": "a", "n": {HUGE}}}', "holds an integer of thousands of digits; write it as a string"
    ),
    "nested 100,000 levels deep": bad_row(
        '{"prompt": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested more than 100 levels deep"
    ),
    "a message nested 200 levels deep": bad_row(
        '{"prompt": [{"role": "user", "content": "a", "x": ' + "[" * 200 + "]" * 200 + "}]}", "'prompt' is nested more"
    ),
    "bytes that are not UTF-8": bad_row(b'{"prompt": "a\xff"}', "is not UTF-8 (byte 13 of the line)"),
    "a NUL byte in its middle": bad_row(b'{"prompt": \x00"a"}', "is not JSON"),
    "no JSON": bad_row("{'prompt': 'a'}", "is not JSON (Expecting property name"),
    "cut off": bad_row('{"prompt": "a', "is not JSON (Unterminated string"),
    "a list": bad_row("[1]", "is a list, expected an object"),
    "no prompt": bad_row('{"answer": "2"}', "'prompt' is missing or null"),
    "a prompt that is null": bad_row('{"prompt": null}', "'prompt' is missing or null"),
    "a prompt that is not a number": bad_row('{"prompt": NaN}', "'prompt' is missing or null"),
    "a prompt that is infinite": bad_row('{"prompt": Infinity}', "'prompt' is inf"),
    "a message without a role": bad_row('{"prompt": [{"content": "a"}]}', "'role' of message 0"),
    "extra_info that is a text": bad_row(
        '{"prompt": "a", "extra_info": "x"}', "'extra_info' is 'x', expected an object"
    ),
    "a key twice": bad_row('{"prompt": "a", "prompt": "b"}', "has the key 'prompt' twice in one object"),
}
FILE_FAULTS: dict[str, Callable[[Path], Outcome]] = {
    "an empty file": file_of("rows.jsonl", b"", "is empty"),
    "JSON that is cut off": file_of("rows.json", json.dumps(TABLE).encode()[:-50], "is not JSON"),
    "JSON nested 100,000 levels deep": file_of("rows.json", b"[" * 100_000, "nested more than 100 levels deep"),
    "gzip that is cut off": file_of(
        "rows.jsonl.gz", lambda: gzip.compress(lines(*TABLE))[:-60], "is damaged after line"
    ),
    "gzip with flipped bytes": file_of(
        "rows.jsonl.gz", lambda: _flip(gzip.compress(lines(*TABLE)), 200), "is damaged after line"
    ),
    "a CSV with a field too many": file_of("rows.csv", b"prompt,answer\na,1\nb,2,3\n", "line 3", "has 3 fields"),
    "a CSV with an open quote": file_of("rows.csv", b'prompt,answer\na,1\n"b,2\n', "is damaged at line"),
    "a CSV that is not UTF-8": file_of("rows.csv", b"prompt,answer\na\xff,1\n", "not UTF-8"),
    "two columns of one name": file_of("rows.csv", b"prompt,prompt\na,1\n", "two columns of the name 'prompt'"),
    "Parquet that is cut off": file_of("rows.parquet", lambda: parquet()[:-100], "not a readable Parquet file"),
    "text called Parquet": file_of("rows.parquet", lines(GOOD), "does not begin with PAR1"),
    "Parquet called JSON lines": file_of("rows.jsonl", parquet, "is a Parquet file by its content"),
    "UTF-16": file_of("rows.jsonl", "\ufeff{}".encode("utf-16-le"), "is UTF-16 text"),
}
PATH_FAULTS: dict[str, Callable[[Path], Outcome]] = {
    "an empty folder": special(Path.mkdir, "is a folder without a file of rows"),
    "a pipe, which would be waited for": special(os.mkfifo, "is a pipe", "write them into a file"),
    "a socket": special(_socket, "is a socket"),
    "a device": special(lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "a link that leads nowhere": special(lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere"),
    "a link to itself": special(lambda path: path.symlink_to(path), "rows.jsonl"),
    "nothing": special(lambda path: (path.parent / "row.jsonl").write_text("{}"), "Did you mean"),
}


def _flip(content: bytes, at: int) -> bytes:
    data = bytearray(content)
    for place in range(at, at + 8):
        data[place] ^= 0x5A
    return bytes(data)


# ---- configurations --------------------------------------------------------------------------------------------


def line(*arguments: str, told: Sequence[str]) -> Callable[[Path], Outcome]:
    """A command line that must be refused before anything starts."""
    return lambda folder: refused(lambda: compose_cli(["data.train_files=rows.jsonl", *arguments]), *told)


def yaml_file(content: str, *told: str) -> Callable[[Path], Outcome]:
    """A YAML file that must be refused before anything starts."""

    def inject(folder: Path) -> Outcome:
        (folder / "mine.yaml").write_text(content)
        arguments = ["--config-path", str(folder), "--config-name", "mine"]
        return refused(lambda: compose_cli(arguments), "mine.yaml", *told)

    return inject


CONFIG_FAULTS: dict[str, Callable[[Path], Outcome]] = {
    "a typo": line("trainer.sede=3", told=["trainer.sede is not a key of hrl. Did you mean trainer.seed?"]),
    "a typo behind a +": line("+trainer.sede=3", told=["Did you mean trainer.seed?"]),
    "a typo behind ++": line("++algorithm.adv_estimatr=grpo", told=["Did you mean algorithm.adv_estimator?"]),
    "an integer of 5,000 digits": line("trainer.seed=" + HUGE, told=["trainer.seed holds a number of thousands"]),
    "nested without end": line("data.map=" + "{a:" * 300, told=["data.map"]),
    "not a number": line("actor_rollout_ref.actor.optim.lr=nan", told=["actor_rollout_ref.actor.optim.lr"]),
    "a reference to nothing": line("trainer.seed=${no.such}", told=["trainer.seed can't be resolved"]),
    "a reference to itself": line("trainer.seed=${trainer.seed}", told=["trainer.seed"]),
    "YAML of a billion laughs": yaml_file(BOMB, "aliases", "Write the values out"),
    "YAML that names Python objects": yaml_file("a: !!python/object/apply:os.system ['true']", "could not determine"),
    "YAML that is not closed": yaml_file("data: {a: [", "can't be composed"),
}
GROUP_OF_ONE = {
    name: line(f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1", told=["actor_rollout_ref.rollout.n"])
    for name in ("grpo", "rloo")
}
TRUNCATED = {
    "T = 0.7 with top_p 0.9": line(
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.top_p=0.9",
        told=["actor_rollout_ref.rollout.top_p is 0.9", "Set it to 1"],
    ),
}


# ---- whole runs in this process --------------------------------------------------------------------------------


def run_with(folder: Path, source: str, *overrides: str, steps: int = 1) -> list[dict[str, Any]]:
    """Run some steps with a reward function and return their metrics."""
    (folder / "mine.py").write_text(f"import os, sys, time\n\ndef compute_score(response, index=None):\n{source}\n")
    ending = [f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    own = [f"reward.custom_reward_function.path={folder / 'mine.py'}", "reward.timeout_s=2", "reward.num_workers=2"]
    arguments = small.runner().arguments(folder / "run", *ending, *own, "trainer.device=cpu", *overrides)
    if not any("rollout.name=" in override for override in overrides):
        arguments.append("actor_rollout_ref.rollout.name=hf")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), in_process():
        run_configured("ppo", compose_cli(arguments))
    return read_metrics(folder / "run")


def ends_run(source: str, *told: str, overrides: Sequence[str] = ()) -> Callable[[Path], Outcome]:
    """A reward that must end the run, with no step made of it."""

    def inject(folder: Path) -> Outcome:
        outcome = refused(lambda: run_with(folder, source, *overrides), *told, within_s=RUN_S)
        if read_metrics(folder / "run"):
            return Outcome(0, outcome.seconds, "a step was made of it")
        return outcome

    return inject


def goes_on(
    source: str, check: Callable[[dict[str, Any]], bool], *overrides: str, steps: int = 1
) -> Callable[[Path], Outcome]:
    """A fault that must leave the run going, with its metrics as they must be."""

    def call(folder: Path) -> str | None:
        record = run_with(folder, source, *overrides, steps=steps)[-1]
        return None if record["step"] == steps and check(record) else f"metrics are {record}"[:_SHOWN]

    return lambda folder: taken(lambda: call(folder), within_s=RUN_S)


def is_finite(record: dict[str, Any]) -> bool:
    """Whether the step updated the weights by finite numbers."""
    return record["actor/grad_norm"] is not None and record["actor/pg_loss"] is not None


LENIENT = "reward.on_error=skip"
SAMPLE = ("compute_score in ", "sample ", "of step 1")
GOOD_SCORE = "    return len(set(response)) / 10"


def once(how: str) -> str:
    """The body of a function that goes wrong for one sample of a run."""
    return (
        "    try:\n"
        "        os.close(os.open(__file__ + '.once', os.O_CREAT | os.O_EXCL))\n"
        f"    except FileExistsError:\n        return len(set(response)) / 10\n    {how}"
    )


NOT_A_REWARD = {
    "nan": ends_run("    return float('nan')", *SAMPLE, "returned nan, which is not finite"),
    "-1e39, beyond float32": ends_run("    return -1e39", *SAMPLE, "not finite in float32"),
    "1e308 as a part": ends_run("    return {'score': 1, 'x': 1e308}", *SAMPLE, "returned as 'x' 1e+308"),
    "10**400": ends_run("    return 10**400", *SAMPLE, "returned inf"),
    "a text": ends_run("    return '1'", *SAMPLE, "returned '1', a str, where a number is expected"),
    "a list of another length": ends_run("    return [1.0] * 3", *SAMPLE, "is called once for each"),
    "a dict without a score": ends_run("    return {'reward': 1}", *SAMPLE, "without the key 'score'"),
    "a generator": ends_run("    yield 1", *SAMPLE, "write `return` in place of `yield`"),
    "None for one": goes_on(
        once("return None"), lambda record: record["reward/num_skipped"] == 1 and is_finite(record)
    ),
}
RAISES = {
    "on one of 16, reward.on_error=raise": ends_run(once("raise ZeroDivisionError('mine')"), *SAMPLE, "mine"),
    "on one of 16, reward.on_error=skip": goes_on(
        once("raise ZeroDivisionError('mine')"),
        lambda record: record["reward/num_errors"] == 1 and is_finite(record),
        LENIENT,
    ),
    "on all, reward.on_error=skip": ends_run(
        "    raise ZeroDivisionError('mine')", "allows 1", "mine", overrides=[LENIENT]
    ),
    "by sys.exit": ends_run("    sys.exit(3)", *SAMPLE, "SystemExit: 3"),
    "KeyboardInterrupt": ends_run("    raise KeyboardInterrupt('mine')", *SAMPLE, "KeyboardInterrupt: mine"),
}
NEVER_RETURNS = {
    "asleep": ends_run("    time.sleep(1000)", *SAMPLE, "took longer than 2 s and was killed"),
    "spinning in C, one of 16, reward.on_error=skip": goes_on(
        once("return sum(range(10**13))"),
        lambda record: record["reward/num_timeouts"] == 1 and is_finite(record),
        LENIENT,
    ),
}
PROCESS_DIES = {
    "by os._exit, always": ends_run("    os._exit(3)", *SAMPLE, "ended with exit code 3, twice"),
    "by SIGKILL, once": goes_on(
        once("os.kill(os.getpid(), 9)"), lambda record: record["reward/num_retries"] >= 1 and is_finite(record)
    ),
    "its connection closed": ends_run("    os.closerange(3, 4096)", *SAMPLE, "its process", ", twice"),
    "junk on its connection": ends_run(
        "    for n in range(3, 4096):\n        try: os.write(n, b'junk')\n        except OSError: pass\n    return 1",
        *SAMPLE,
        "to the connection that answers samples",
    ),
}
ALIKE = "    return 1.0"
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
NO_SPREAD = {
    "with the filter on": ends_run(
        ALIKE, "step 1: 2 batches of prompts were sampled", "8 groups with 1 everywhere", overrides=FILTERED
    ),
    "without it": goes_on(
        ALIKE, lambda record: record["rollout/zero_variance_groups"] > 0 and record["actor/grad_norm"] == 0.0
    ),
}
SCRIPTED = "actor_rollout_ref.rollout.name=scripted"
EMPTY = {
    "every third": goes_on(
        GOOD_SCORE,
        lambda record: record["rollout/empty_responses"] > 0 and is_finite(record),
        SCRIPTED,
        "+actor_rollout_ref.rollout.engine_kwargs.scripted.empty_every=3",
    ),
    "all": goes_on(
        GOOD_SCORE,
        lambda record: record["rollout/empty_responses"] > 0,
        SCRIPTED,
        "+actor_rollout_ref.rollout.engine_kwargs.scripted.empty_every=1",
    ),
}


def _stop_ids(told: TokenIds, *, eos: bool = True, more: object = None) -> Callable[[Path], Outcome]:
    """A tokenizer whose end token is its padding, or that has none, or a model with further stop ids."""

    def call(folder: Path) -> str | None:
        named = {"pad_token": "<|end|>"} if eos else {"eos_token": None, "pad_token": None}
        tokenizer = make_tokenizer(**named)
        if more is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
        found = token_ids(tokenizer, folder)
        return None if found == told else f"{found}, not {told}"

    return lambda folder: taken(lambda: call(folder))


def _stop_ids_of_text(folder: Path) -> Outcome:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    return refused(lambda: token_ids(make_tokenizer(), folder), "generation_config.json", "expected the id of a token")


SPECIAL = {
    "the padding is the end token": _stop_ids(TokenIds(pad=257, stop=(257,), vocab_size=259)),
    "no end token": _stop_ids(TokenIds(pad=0, stop=(), vocab_size=259), eos=False),
    "two stop ids": _stop_ids(TokenIds(pad=257, stop=(257, 5), vocab_size=259), more=[5, 257]),
    "stop ids that are texts": _stop_ids_of_text,
}


def _too_few(content: bytes, *told: str) -> Callable[[Path], Outcome]:
    def inject(folder: Path) -> Outcome:
        (folder / "rows.jsonl").write_bytes(content)
        data = f"data.train_files={folder / 'rows.jsonl'}"
        return refused(lambda: run_with(folder, ALIKE, data, "data.val_files=[]", "data.max_prompt_length=64"), *told)

    return inject


NO_DATA = {
    "an empty list": _too_few(b"\n", "rows.jsonl", "no row"),
    "fewer rows than a batch": _too_few(lines(GOOD, GOOD), "2 rows read", "4 needed", "data.train_batch_size=2"),
}


def same_numbers(*overrides: str) -> Callable[[Path], Outcome]:
    """Runs that are cut otherwise have the same gradient."""

    def call(folder: Path) -> str | None:
        norms = []
        exact = ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.rollout.dtype=float32"]
        for number, override in enumerate(overrides):
            (folder / str(number)).mkdir()
            norms.append(run_with(folder / str(number), GOOD_SCORE, override, *exact)[-1]["actor/grad_norm"])
        spread = (max(norms) - min(norms)) / max(norms)
        return None if spread < 1e-5 else f"gradient norms are {norms}"

    return lambda folder: taken(lambda: call(folder), within_s=3 * RUN_S)


_ACTOR = "actor_rollout_ref.actor"
CUTS = {
    "micro-batches of 1, 4 and 16 rows": same_numbers(
        *(f"{_ACTOR}.ppo_micro_batch_size_per_gpu={rows}" for rows in (1, 4, 16)),
    ),
    "micro-batches of 128 and 4,096 tokens": same_numbers(
        *(f"{_ACTOR}.ppo_max_token_len_per_gpu={tokens}" for tokens in (128, 4096)),
    ),
}
KINDS: Sequence[tuple[str, dict[str, Callable[[Path], Outcome]], bool]] = (
    ("a row that can't be used", ROW_FAULTS, True),
    ("a file of rows that can't be read", FILE_FAULTS, True),
    (
        "bytes of a Parquet file flipped",
        {
            w: file_of("rows.parquet", flipped(w), "rows.parquet")
            for w in ("footer", "length of the footer", "dictionary", "header of a page", "data")
        },
        True,
    ),
    ("something that is called a file and is none", PATH_FAULTS, True),
    ("rows of several schemas", {"Parquet files of a folder": _mixed}, True),
    ("a row that can't be used", {"after 50,000 good ones": _late, "a line of 100 MB": _long}, False),
    ("prompts over the limit", {"1 of 1000": _overlong(1, 1000), "all": _overlong(8, 8)}, True),
    ("a configuration that makes no sense", CONFIG_FAULTS, True),
    ("one sample for a prompt whose advantage needs several", GROUP_OF_ONE, True),
    ("a sampler that does not sample from the policy", TRUNCATED, True),
    ("no data, or too little", NO_DATA, False),
    ("a reward that is none", NOT_A_REWARD, False),
    ("a reward that raises", RAISES, False),
    ("a reward that never returns", NEVER_RETURNS, False),
    ("a reward's process that dies", PROCESS_DIES, False),
    ("no group has any spread", NO_SPREAD, False),
    ("empty responses", EMPTY, False),
    ("a batch cut in another way", CUTS, False),
    ("special tokens", SPECIAL, True),
)
FAULTS = [
    Fault(kind, variant, inject, is_quick) for kind, variants, is_quick in KINDS for variant, inject in variants.items()
]
