"""Checkpoints in a store: they count once they are whole, and come back to the byte or not at all."""

from __future__ import annotations

import errno
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import fsspec
import pytest

from hrl.cluster import remote_checkpoints, remote_store
from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.manifest import MANIFEST, Manifest
from hrl.cluster.remote_checkpoints import Uploads, fetch, fetch_newer
from hrl.cluster.remote_store import GivenUpError, RemoteStore, RemoteStoreError, UnsendableError
from hrl.report.run_folder import RunFolderError
from tests.cluster.s3_server import STORES, S3Server, s3_server

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    if not STORES.is_dir():
        pytest.skip("make install-dev installs the server")
    with s3_server() as running:
        yield running


@pytest.fixture(params=["memory", "s3", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty store."""
    monkeypatch.setattr(remote_store, "_PAUSES_S", (0.0, 0.0))
    if request.param == "memory":
        return f"memory://store-{next(_NUMBERS)}"
    if request.param == "file":
        return f"file://{tmp_path}/store"
    server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{next(_NUMBERS)}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/runs/one"


@pytest.fixture
def store(address: str) -> RemoteStore:
    return RemoteStore(address)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    """An empty store, for what does not depend on its protocol."""
    monkeypatch.setattr(remote_store, "_PAUSES_S", (0.0, 0.0))
    return RemoteStore(f"memory://store-{next(_NUMBERS)}")


def checkpoint(folder: Path, step: int, *, score: float | None = None, weights: bytes = b"w" * 1000) -> Path:
    """The folder of a whole checkpoint."""
    made = folder / f"step_{step}"
    (made / "actor").mkdir(parents=True)
    (made / "actor" / "shard.safetensors").write_bytes(weights)
    (made / "state.json").write_text(f'{{"step": {step}}}')
    Manifest.of(made, step, score=score).write(made)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def objects(store: RemoteStore, step: int) -> list[str]:
    root = f"{store._root}/checkpoints/step_{step}"
    return sorted(path.partition(f"step_{step}/")[2] for path in store._fs.find(root))


def test_what_was_sent_comes_back_to_the_byte(store: RemoteStore, tmp_path: Path) -> None:
    sent = checkpoint(tmp_path / "here", 20, weights=bytes(range(256)) * 5000)
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 20}\n')
    assert "without checkpoints" in store.probe()
    store.upload(sent, 20, {"metrics.jsonl": log, "alarms.jsonl": tmp_path / "missing"})
    assert store.steps() == [20] and store.torn() == []
    assert "steps 20" in store.probe()
    (back := tmp_path / "back").mkdir()
    store.fetch(20, back)
    assert contents(back) == contents(sent)
    assert store.fetch_beside(["metrics.jsonl", "alarms.jsonl"], back) == ["metrics.jsonl"]
    assert (back / "metrics.jsonl").read_text() == '{"step": 20}\n'


def test_an_upload_that_fails_half_way_does_not_count_and_a_second_completes_it(
    store: RemoteStore, tmp_path: Path
) -> None:
    sent = checkpoint(tmp_path, 5)
    (sent / "actor" / "shard.safetensors").unlink()
    with pytest.raises(OSError, match=r"shard\.safetensors"):
        store.upload(sent, 5, {})
    assert store.steps() == [] and MANIFEST not in objects(store, 5)
    (sent / "actor" / "shard.safetensors").write_bytes(b"w" * 1000)
    store.upload(sent, 5, {})
    assert store.steps() == [5]


def test_a_file_that_changed_since_its_manifest_is_not_published(in_memory: RemoteStore, tmp_path: Path) -> None:
    sent = checkpoint(tmp_path, 5)
    (sent / "actor" / "shard.safetensors").write_bytes(b"w" * 999 + b"x")
    with pytest.raises(RemoteStoreError, match=r"shard\.safetensors has changed since it was saved"):
        in_memory.upload(sent, 5, {})
    assert in_memory.steps() == []


@pytest.mark.parametrize("damage", [lambda sent: sent[:-1], lambda sent: b"\x00" + sent[1:]], ids=["cut", "flipped"])
def test_a_damaged_object_is_named_and_not_taken(
    store: RemoteStore, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    store.upload(checkpoint(tmp_path / "here", 7), 7, {})
    path = store._path(7, "actor/shard.safetensors")
    store._fs.pipe_file(path, damage(b"w" * 1000))
    (back := tmp_path / "back").mkdir()
    with pytest.raises(RemoteStoreError, match=r"step_7/actor/shard\.safetensors in .* is damaged"):
        store.fetch(7, back)


def test_a_checkpoint_that_lacks_a_file_is_not_taken_and_the_one_before_is(store: RemoteStore, tmp_path: Path) -> None:
    for step in (6, 7):
        store.upload(checkpoint(tmp_path / "there", step), step, {})
    store._fs.rm_file(store._path(7, "actor/shard.safetensors"))
    checkpoints, told = CheckpointStore(tmp_path / "checkpoints"), list[str]()
    fetch_newer(store, checkpoints, tmp_path, told.append)
    assert checkpoints.steps() == [6]
    assert "step_7 is not used" in told[0] and "actor/shard.safetensors" in told[0]


def test_a_damaged_manifest_is_named(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.upload(checkpoint(tmp_path, 7), 7, {})
    in_memory._fs.pipe_file(in_memory._path(7, MANIFEST), b'{"format": 1}')
    with pytest.raises(RemoteStoreError, match=r"step_7/manifest\.json is damaged"):
        in_memory.fetch(7, tmp_path)


@pytest.mark.parametrize("name", ["actor/shard.safetensors", MANIFEST])
def test_a_connection_that_ends_early_is_no_damage(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent = checkpoint(tmp_path / "there", 7)
    in_memory.upload(sent, 7, {})
    end_early(in_memory, name, monkeypatch)
    (back := tmp_path / "back").mkdir()
    in_memory.fetch(7, back)
    assert contents(back) == contents(sent)
    assert in_memory.transfers.retries == 1


def test_a_log_that_arrives_cut_is_fetched_again(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 7}\n')
    in_memory.upload(checkpoint(tmp_path, 7), 7, {log.name: log})
    end_early(in_memory, log.name, monkeypatch)
    (back := tmp_path / "back").mkdir()
    in_memory.fetch_beside([log.name], back)
    assert contents(back) == {log.name: b'{"step": 7}\n'}


def end_early(store: RemoteStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next reading of an object end half way, without an error."""
    opened, read, early = store._fs.open, store._fs.cat_file, iter([True])

    def open_early(path: str, mode: str) -> IO[bytes]:
        if mode == "rb" and path.endswith(name) and next(early, False):
            whole = read(path)
            return io.BytesIO(whole[: len(whole) // 2])
        return opened(path, mode)

    def read_early(path: str) -> bytes:
        whole = read(path)
        return whole[: len(whole) // 2] if path.endswith(name) and next(early, False) else whole

    monkeypatch.setattr(store._fs, "open", open_early)
    monkeypatch.setattr(store._fs, "cat_file", read_early)


def test_only_what_changed_is_sent_again(in_memory: RemoteStore, tmp_path: Path) -> None:
    sent = checkpoint(tmp_path, 3)
    in_memory.upload(sent, 3, {})
    before = in_memory.transfers.nbytes
    Manifest.read(sent).with_score(0.5).write(sent)
    in_memory.upload(sent, 3, {})
    assert in_memory.transfers.nbytes == before
    assert in_memory.manifest(3).score == 0.5


def test_a_run_that_finds_another_owner_sends_nothing_more(in_memory: RemoteStore) -> None:
    assert in_memory.claim("first") is None
    assert in_memory.claim("first") is None  # the same run, started again
    in_memory.require_owner("first")
    before = RemoteStore(in_memory.address).claim("second")
    assert before is not None and before.startswith("process ")
    with pytest.raises(RemoteStoreError, match="another run writes to"):
        in_memory.require_owner("first")


def test_a_damaged_owner_is_named_with_the_way_out(in_memory: RemoteStore) -> None:
    in_memory.claim("first")
    in_memory._fs.pipe_file(f"{in_memory._root}/owner.json", b"{")
    with pytest.raises(RemoteStoreError, match=r"owner\.json is damaged: .* Remove it, if the store is this run's"):
        in_memory.claim("second")


def test_a_transfer_is_tried_again_and_counted(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, opened, failures = checkpoint(tmp_path, 3), in_memory._fs.open, iter([True, True])

    def open_or_fail(path: str, mode: str, **options: object):
        if path.endswith("shard.safetensors") and mode == "wb" and next(failures, False):
            raise ConnectionResetError("reset by peer")
        return opened(path, mode, **options)

    monkeypatch.setattr(in_memory._fs, "open", open_or_fail)
    in_memory.upload(sent, 3, {})
    assert in_memory.steps() == [3]
    assert in_memory.transfers.retries == 2


class OfAClientError(Exception):
    """What a store's client raises that is no error of Python's own."""


def test_whatever_a_client_raises_is_told_as_the_store_s_and_tried_again(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, opened, failures = (
        checkpoint(tmp_path, 3),
        in_memory._fs.open,
        iter([OfAClientError("503"), KeyError("ETag")]),
    )

    def open_or_fail(path: str, mode: str, **options: object) -> IO[bytes]:
        if error := next(failures, None):
            raise error
        return opened(path, mode, **options)

    def denied(path: str) -> bytes:
        raise OfAClientError("403\ndenied")

    monkeypatch.setattr(in_memory._fs, "open", open_or_fail)
    in_memory.upload(sent, 3, {})
    assert in_memory.steps() == [3] and in_memory.transfers.retries == 2
    monkeypatch.setattr(in_memory._fs, "cat_file", denied)
    with pytest.raises(RemoteStoreError, match=r"memory://.* can't be read: OfAClientError: 403 denied; look at the"):
        in_memory.claim("run")


def test_giving_up_ends_a_transfer_without_another_attempt(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.give_up.set()
    with pytest.raises(GivenUpError, match="the run ended before"):
        in_memory.upload(checkpoint(tmp_path, 3), 3, {})
    assert in_memory.steps() == []


def test_an_upload_that_is_given_up_leaves_the_log_of_the_one_before(in_memory: RemoteStore, tmp_path: Path) -> None:
    sent, log = checkpoint(tmp_path, 3), tmp_path / "metrics.jsonl"
    log.write_text('{"step": 3}\n')
    in_memory.upload(sent, 3, {"metrics.jsonl": log})
    in_memory.give_up.set()
    with pytest.raises(GivenUpError):
        in_memory.upload(sent, 3, {"metrics.jsonl": log})
    in_memory.give_up.clear()
    in_memory.fetch_beside(["metrics.jsonl"], tmp_path)
    assert log.read_text() == '{"step": 3}\n'


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense://a/b", "nonsense"),
        ("s3://key:secret@bucket/a", "holds a login"),
        ("hdfs://me:secret@host/a", "holds a login"),
        ("s3://bucket/a?X-Amz-Signature=secret", r"holds what follows a \?"),
        ("s3://bucket/a#secret", "holds what follows a #"),
        ("s3://[secret", "no address of a store"),
        ("checkpoints", "no address of a store"),
        ("s3://", "no address of a store"),
    ],
)
def test_an_address_that_can_not_work_is_refused_without_its_login(address: str, said: str) -> None:
    with pytest.raises(RemoteStoreError, match=said) as caught:
        RemoteStore(address)
    assert "secret" not in str(caught.value)


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with the same status."""

    status = 403

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("status", [403, 503])
def test_a_store_that_refuses_is_named_with_the_way_out(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = type("Handler", (_Refusing,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = S3Server(server.server_address[1], None).environment  # type: ignore[arg-type]
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RemoteStoreError, match=r"s3://bucket/a can't be written to: .*credentials in the env"):
            RemoteStore("s3://bucket/a").probe()
        server.shutdown()


def test_what_a_web_server_refuses_is_named_with_the_way_out() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RemoteStoreError, match=r"can't be read: ClientResponseError: 403.*credentials in the env"):
            RemoteStore(f"http://127.0.0.1:{server.server_address[1]}/a").claim("run")
        server.shutdown()


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3Server(1, None).environment.items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteStoreError, match=r"can't be written to: .*connect"):
        RemoteStore("s3://bucket/a").probe()


def test_a_missing_bucket_is_named(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteStoreError, match=r"the store s3://no-such-bucket/a can't be written to"):
        RemoteStore("s3://no-such-bucket/a").probe()


# ---------------------------------------------------------------------- the thread that sends


class Sending:
    """Uploads of checkpoints that lie in a folder, and what they tell."""

    def __init__(
        self,
        store: RemoteStore,
        folder: Path,
        keep: int | None = None,
        stops: bool = True,
        passed_over: Iterable[int] = (),
    ) -> None:
        store.claim("run")
        self.folder, self.told = folder / "checkpoints", list[str]()
        checkpoints = CheckpointStore(self.folder)
        self.uploads = Uploads(store, "run", checkpoints, keep, self.told.append, stops=stops, passed_over=passed_over)

    def send(self, step: int, score: float | None = None) -> Path:
        made = checkpoint(self.folder, step, score=score)
        self.uploads.send(step)
        return made


def test_uploads_keep_the_newest_and_the_best(in_memory: RemoteStore, tmp_path: Path) -> None:
    sending = Sending(in_memory, tmp_path, keep=2)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        sending.send(step, score)
        until(lambda: not sending.uploads.steps())
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.steps() == [2, 3, 4]
    assert [line.split(" in ")[0][-6:] for line in sending.told] == ["step_1", "step_2", "step_3", "step_4"]


def test_what_an_interrupted_upload_left_goes_with_the_next(in_memory: RemoteStore, tmp_path: Path) -> None:
    sending = Sending(in_memory, tmp_path, keep=2)
    in_memory._fs.pipe_file(in_memory._path(1, "actor/shard.safetensors"), b"half")
    sending.send(2)
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.steps() == [2] and in_memory.torn() == []


@pytest.mark.parametrize("stops", [True, False])
def test_a_failed_upload_ends_the_run_or_is_counted_as_configured(
    in_memory: RemoteStore, tmp_path: Path, stops: bool
) -> None:
    sending = Sending(in_memory, tmp_path, stops=stops)
    (checkpoint(sending.folder, 1) / "state.json").write_text("changed since")
    sending.uploads.send(1)
    sending.send(2)
    (missing,) = sending.uploads.close(patience_s=20).values()
    assert "state.json has changed" in missing
    assert in_memory.steps() == [2]
    if stops:
        with pytest.raises(RemoteStoreError, match=r"state\.json has changed"):
            sending.uploads.look()
    else:
        metrics = sending.uploads.look()
        assert metrics["checkpoint/failed_uploads"] == 1.0
        assert "state.json has changed" in sending.told[-1] and "The run goes on" in sending.told[-1]


def test_a_run_that_lost_its_store_to_another_sends_nothing_more(in_memory: RemoteStore, tmp_path: Path) -> None:
    sending = Sending(in_memory, tmp_path)
    in_memory.claim("another run")
    sending.send(1)
    (reason,) = sending.uploads.close(patience_s=20).values()
    assert reason.startswith("another run writes to")
    assert in_memory.steps() == [] and objects(in_memory, 1) == []


@pytest.fixture
def slow(in_memory: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is opened in the store before it is set."""
    release, opened = threading.Event(), in_memory._fs.open

    def open_later(path: str, mode: str, **options: object):
        assert release.wait(30)
        return opened(path, mode, **options)

    in_memory.claim("run")
    monkeypatch.setattr(in_memory._fs, "open", open_later)
    monkeypatch.setattr(in_memory, "claim", lambda run: None)
    return release


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_saves_faster_than_the_store_takes_leaves_out_those_between(
    in_memory: RemoteStore, slow: threading.Event, tmp_path: Path
) -> None:
    sending = Sending(in_memory, tmp_path)
    sending.send(1)
    until(lambda: sending.uploads._under_way == 1)
    sending.send(2)
    assert sending.uploads.steps() == {1, 2}  # which the disk has to keep
    sending.send(3)
    assert sending.uploads.steps() == {1, 3}
    slow.set()
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.steps() == [1, 3]
    assert any("step 2 is not sent" in line for line in sending.told)
    assert sending.uploads.look()["checkpoint/failed_uploads"] == 1.0


def test_a_score_that_comes_while_its_checkpoint_is_sent_is_sent_too(
    in_memory: RemoteStore, slow: threading.Event, tmp_path: Path
) -> None:
    sending = Sending(in_memory, tmp_path)
    made = sending.send(1)
    until(lambda: sending.uploads._under_way == 1)
    Manifest.read(made).with_score(0.5).write(made)
    sending.uploads.send(1)
    slow.set()
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.manifest(1).score == 0.5


def assert_sent_again(sending: Sending, store: RemoteStore, why: str) -> None:
    """Send a checkpoint whose first attempt fails; the run goes on."""
    sending.send(1)
    until(lambda: store.steps() == [1])
    assert sending.uploads.close(patience_s=20) == {}
    sending.uploads.look()  # which raises if the run is to end
    assert any(why in line and "sent again" in line for line in sending.told)


def test_an_outage_shorter_than_the_time_between_two_saves_costs_nothing(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = Sending(in_memory, tmp_path)
    failures, opened = iter([True] * 7), in_memory._fs.open

    def open_or_fail(path: str, mode: str, **options: object):
        if mode == "wb" and next(failures, False):
            raise ConnectionResetError("reset by peer")
        return opened(path, mode, **options)

    monkeypatch.setattr(in_memory._fs, "open", open_or_fail)
    monkeypatch.setattr(remote_checkpoints, "_AGAIN_S", 0.01)
    assert_sent_again(sending, in_memory, "reset by peer")


def test_a_checkpoint_that_the_disk_can_not_read_for_a_moment_is_sent_again(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, read, failures = (
        Sending(in_memory, tmp_path),
        Manifest.read,
        iter([OSError(errno.EIO, "Input/output error")]),
    )

    def read_or_fail(folder: Path) -> Manifest:
        if error := next(failures, None):
            raise error
        return read(folder)

    monkeypatch.setattr(Manifest, "read", read_or_fail)
    monkeypatch.setattr(remote_checkpoints, "_AGAIN_S", 0.01)
    assert_sent_again(sending, in_memory, "OSError: [Errno 5]")


def test_what_no_store_can_know_of_ends_no_thread(in_memory: RemoteStore, tmp_path: Path) -> None:
    sending = Sending(in_memory, tmp_path)
    made = checkpoint(sending.folder, 1)
    (made / MANIFEST).write_text("{}")
    sending.uploads.send(1)
    sending.uploads.send(7)  # there is none
    sending.send(2)
    (reason,) = sending.uploads.close(patience_s=20).values()
    assert "step_1 can't be sent" in reason and in_memory.steps() == [2]


def test_another_run_is_found_out_in_the_midst_of_a_checkpoint(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.claim("one")
    send = in_memory._send

    def claimed_meanwhile(*what: object) -> None:
        send(*what)  # type: ignore[arg-type]
        RemoteStore(in_memory.address).claim("two")

    in_memory._send = claimed_meanwhile  # type: ignore[method-assign]
    with pytest.raises(UnsendableError, match="another run writes to"):
        in_memory.upload(checkpoint(tmp_path, 1), 1, {}, "one")
    assert in_memory.steps() == []


# ---------------------------------------------------------------------- another machine goes on


def test_the_newest_undamaged_checkpoint_is_fetched_with_the_log(in_memory: RemoteStore, tmp_path: Path) -> None:
    log = tmp_path / "there" / "metrics.jsonl"
    for step in (1, 2, 3):
        made = checkpoint(tmp_path / "there", step)
        log.write_text("".join(f'{{"step": {each}}}\n' for each in range(1, step + 1)))
        in_memory.upload(made, step, {"metrics.jsonl": log})
    in_memory._fs.pipe_file(in_memory._path(3, "state.json"), b"flipped")
    told: list[str] = []
    folder = tmp_path / "here"
    checkpoints = CheckpointStore(folder / "checkpoints")
    fetch_newer(in_memory, checkpoints, folder, told.append)
    assert checkpoints.steps() == [2]
    assert contents(checkpoints.path(2)) == contents(tmp_path / "there" / "step_2")
    assert (folder / "metrics.jsonl").read_text() == log.read_text()
    assert "step_3 is not used" in told[0] and "state.json" in told[0] and told[1].startswith("fetched")
    assert checkpoints.interrupted() == [] and not (folder / "tmp.run").exists()


def test_nothing_is_fetched_where_the_disk_has_as_new_a_checkpoint(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.upload(checkpoint(tmp_path / "there", 2), 2, {})
    checkpoint(tmp_path / "checkpoints", 2, weights=b"mine")
    before = in_memory.transfers.nbytes
    fetch_newer(in_memory, CheckpointStore(tmp_path / "checkpoints"), tmp_path, pytest.fail)
    assert in_memory.transfers.nbytes == before


def test_a_damaged_checkpoint_on_the_disk_is_replaced_by_that_of_the_store(
    in_memory: RemoteStore, tmp_path: Path
) -> None:
    in_memory.upload(checkpoint(tmp_path / "there", 2), 2, {})
    (checkpoint(tmp_path / "checkpoints", 2) / "state.json").write_text("flipped")
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    fetch_newer(in_memory, checkpoints, tmp_path, lambda _: None)
    assert contents(checkpoints.path(2)) == contents(tmp_path / "there" / "step_2")
    assert (tmp_path / "checkpoints" / "damaged.step_2").is_dir()


def test_a_store_of_damaged_checkpoints_alone_is_no_fresh_start(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.upload(checkpoint(tmp_path / "there", 2), 2, {})
    in_memory._fs.pipe_file(in_memory._path(2, "state.json"), b"flipped")
    with pytest.raises(RemoteStoreError, match="none is as its manifest says"):
        fetch_newer(in_memory, CheckpointStore(tmp_path / "checkpoints"), tmp_path, lambda _: None)


def test_a_step_that_a_store_has_not_is_named_with_those_it_has(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.upload(checkpoint(tmp_path / "there", 2), 2, {})
    with pytest.raises(RemoteStoreError, match=r"step_3 is no whole checkpoint; the store has those of steps 2"):
        fetch(in_memory, 3, CheckpointStore(tmp_path / "checkpoints"), tmp_path)


def test_steps_that_are_made_again_count_no_longer(in_memory: RemoteStore, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        in_memory.upload(checkpoint(tmp_path, step), step, {})
    in_memory.supersede([2, 3, 9])
    assert in_memory.steps() == [1] and in_memory.torn() == []
    assert "actor/shard.safetensors" in objects(in_memory, 3)  # nothing is lost
    in_memory.upload(tmp_path / "step_2", 2, {})
    assert in_memory.steps() == [1, 2] and in_memory.superseded() == [3]
    sending = Sending(in_memory, tmp_path)
    sending.send(4)
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.steps() == [1, 2, 4] and objects(in_memory, 3) == []  # of another branch, and by now older


def test_checkpoints_that_were_passed_over_count_until_the_run_has_saved_anew(
    in_memory: RemoteStore, tmp_path: Path
) -> None:
    for step in (2, 3, 4):
        in_memory.upload(checkpoint(tmp_path / "there", step), step, {})
    in_memory._fs.pipe_file(in_memory._path(3, "state.json"), b"flipped")
    first = checkpoint(tmp_path / "here" / "checkpoints", 1)  # the run goes on from there, and makes 3 first
    sending = Sending(in_memory, tmp_path / "here", passed_over=(2, 3, 4))
    sending.uploads.send(1)
    until(lambda: not sending.uploads.steps())
    assert in_memory.steps() == [1, 2, 3, 4]
    made = sending.send(3)  # with the very manifest that the damaged one has
    assert sending.uploads.close(patience_s=20) == {}
    assert in_memory.steps() == [1, 3] and in_memory.superseded() == [4]
    (back := tmp_path / "back").mkdir()
    RemoteStore(in_memory.address).fetch(3, back)
    assert contents(back) == contents(made) and first.is_dir()
    assert any("checkpoints of steps 2, 3, 4" in line and "count no longer" in line for line in sending.told)


def test_a_disk_without_room_is_not_the_store_s_fault(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.upload(checkpoint(tmp_path / "there", 2), 2, {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote_store.os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"make room there"):
        fetch(in_memory, 2, CheckpointStore(tmp_path / "checkpoints"), tmp_path)
    assert in_memory.transfers.retries == 0


def test_memory_is_one_place_for_all_of_a_process() -> None:
    """What the other tests rest on: two stores of one address see the same objects."""
    fsspec.filesystem("memory").pipe_file("/somewhere/a", b"1")
    assert fsspec.filesystem("memory").cat_file("/somewhere/a") == b"1"
