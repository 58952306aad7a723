"""Checkpoints in a store: they count once they are whole, and come back to the byte or not at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from hrl.cluster import remote_store
from hrl.cluster.manifest import MANIFEST, Manifest
from hrl.cluster.remote_store import GivenUpError, RemoteStore, RemoteStoreError
from hrl.cluster.remote_checkpoints import Uploads
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


def test_a_damaged_manifest_is_named(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.upload(checkpoint(tmp_path, 7), 7, {})
    in_memory._fs.pipe_file(in_memory._path(7, MANIFEST), b'{"format": 1}')
    with pytest.raises(RemoteStoreError, match=r"step_7/manifest\.json is damaged"):
        in_memory.fetch(7, tmp_path)


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


def test_giving_up_ends_a_transfer_without_another_attempt(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.give_up.set()
    with pytest.raises(GivenUpError, match="the run ended before"):
        in_memory.upload(checkpoint(tmp_path, 3), 3, {})
    assert in_memory.steps() == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense://a/b", "nonsense"),
        ("s3://key:secret@bucket/a", "holds a login"),
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


def test_uploads_keep_the_newest_and_the_best(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.claim("run")
    uploads = Uploads(in_memory, "run", 2, {})
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        uploads.send(step, checkpoint(tmp_path, step, score=score), patience_s=20)
    assert uploads.close(patience_s=20) == ()
    assert in_memory.steps() == [2, 3, 4]
    assert sorted(uploads.done) == [1, 2, 3, 4]
    assert uploads.take_error() is None


def test_what_an_interrupted_upload_left_goes_with_the_next(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.claim("run")
    in_memory._fs.pipe_file(in_memory._path(1, "actor/shard.safetensors"), b"half")
    uploads = Uploads(in_memory, "run", 2, {})
    uploads.send(2, checkpoint(tmp_path, 2), patience_s=20)
    assert uploads.close(patience_s=20) == ()
    assert in_memory.steps() == [2] and in_memory.torn() == []


def test_a_failed_upload_is_told_once_and_the_next_is_sent(in_memory: RemoteStore, tmp_path: Path) -> None:
    in_memory.claim("run")
    uploads = Uploads(in_memory, "run", 2, {})
    broken = checkpoint(tmp_path, 1)
    (broken / "state.json").write_text("changed since")
    uploads.send(1, broken, patience_s=20)
    uploads.send(2, checkpoint(tmp_path, 2), patience_s=20)
    assert uploads.close(patience_s=20) == ()
    error = uploads.take_error()
    assert error is not None and "state.json has changed" in str(error)
    assert uploads.take_error() is None
    assert in_memory.steps() == [2]


def test_a_run_that_saves_faster_than_the_store_takes_waits_and_then_says_so(
    in_memory: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.claim("run")
    release = threading.Event()
    opened = in_memory._fs.open

    def open_later(path: str, mode: str, **options: object):
        assert release.wait(30)
        return opened(path, mode, **options)

    monkeypatch.setattr(in_memory._fs, "open", open_later)
    uploads = Uploads(in_memory, "run", None, {})
    for step in (1, 2):
        uploads.send(step, checkpoint(tmp_path, step), patience_s=5)
    assert uploads.steps == {1, 2}
    with pytest.raises(RemoteStoreError, match="those of steps 1, 2 were not sent within 0.05 s"):
        uploads.send(3, checkpoint(tmp_path, 3), patience_s=0.05)
    release.set()
    assert uploads.close(patience_s=20) == ()


def test_memory_is_one_place_for_all_of_a_process() -> None:
    """What the other tests rest on: two stores of one address see the same objects."""
    fsspec.filesystem("memory").pipe_file("/somewhere/a", b"1")
    assert fsspec.filesystem("memory").cat_file("/somewhere/a") == b"1"
