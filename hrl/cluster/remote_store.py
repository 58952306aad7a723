"""A store on the network that keeps a run's checkpoints: `s3://`, `gs://`, `abfs://`, `hdfs://`, or what fsspec knows.

It holds what another machine needs to go on with the run, below the address that the configuration names:

    owner.json             which run writes here; one that finds another's name there stops writing
    run/                   the run's metrics, alarms and configuration, as they were with the newest checkpoint
    checkpoints/step_N/    a checkpoint, file by file, and `manifest.json` last: without it the checkpoint doesn't
                           count; it is called `superseded.json` where a run went on from an earlier step

Nothing is renamed there, because an object store can't: a checkpoint appears with its manifest, and its removal begins
with the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from xxhash import xxh3_128

from hrl.cluster.checkpoints import folder_name, step_of
from hrl.cluster.manifest import MANIFEST, Manifest, ManifestError
from hrl.cluster.threads import in_threads
from hrl.errors import HrlError
from hrl.workers.engine.digest import FileDigest

T = TypeVar("T")
logger = logging.getLogger(__name__)

KEY = "trainer.default_remote_dir"
_RESUMED = "trainer.resume_from_path"
OWNER = "owner.json"
RUN = "run"
_SUPERSEDED = "superseded.json"
CHECKPOINTS = "checkpoints"

#: Bytes that are read, hashed and sent at once; a transfer that is given up ends after one.
_CHUNK_BYTES = 16 << 20
#: Files on their way at the same time.
_PARALLEL = 4
#: Seconds between attempts at a file, beside those that the store's own client makes of each request.
_PAUSES_S = (2.0, 8.0, 30.0)


class RemoteStoreError(HrlError, RuntimeError):
    """A store can't be reached, written or read, or another run writes to it."""


class DamagedObjectError(RemoteStoreError):
    """A checkpoint in a store is not what its manifest says, however often it is fetched."""


class MissingObjectError(RemoteStoreError):
    """An object is not in the store."""


class UnsendableError(RemoteStoreError):
    """A checkpoint that will not be sent, however often that is tried: it has changed, or another run has the store."""


class GivenUpError(RemoteStoreError):
    """A transfer was given up because the run ends."""


@dataclass
class Transfers:
    """What was sent to a store or fetched from it so far; counts only grow.

    Attributes:
        nbytes: Bytes of whole files.
        retries: Attempts at a file beyond the first.
    """

    nbytes: int = 0
    retries: int = 0


class RemoteStore:
    """The store of one run.

    Args:
        address: As configured, e.g. `s3://bucket/runs/one`.
        key: Which configures it.

    Attributes:
        transfers: What went through this object.
        give_up: Once it is set, transfers end with `GivenUpError` after the chunk that they are at.

    Raises:
        RemoteStoreError: The address names no known store, holds a login or a signature, or lacks the package of its
            protocol.
    """

    def __init__(self, address: str, key: str = KEY) -> None:
        _require_plain(address, key)
        self.address = address.rstrip("/")
        self._way_out = f"look at the store and the credentials in the environment, or leave {key} out"
        self.transfers = Transfers()
        self.give_up = threading.Event()
        self._pauses_s = _PAUSES_S
        parts = urlsplit(self.address)
        if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
            raise RemoteStoreError(f"{key}={address} is no address of a store; write e.g. s3://bucket/folder")
        with self._told("opened"):
            self._fs, self._root = _file_system(self.address)

    # ------------------------------------------------------------------ what is there

    def probe(self) -> str:
        """Write, read, list and delete an object; return what was found, in words.

        Raises:
            RemoteStoreError: One of these did not work.
        """
        path = f"{self._root}/.probe-{os.getpid()}-{time.time_ns()}"
        with self._told("written to"):
            self._make_room_for(path)
            self._fs.pipe_file(path, b"hrl")
        with self._told("read"):
            content = self._fs.cat_file(path)
        if content != b"hrl":
            raise RemoteStoreError(f"{self.address} returned other bytes than were written to it; {self._way_out}")
        with self._told("cleaned up"):
            self._fs.rm_file(path)
        steps = ", ".join(map(str, self.steps()))
        return f"{self.address}, {f'checkpoints of steps {steps}' if steps else 'without checkpoints'}"

    def steps(self) -> list[int]:
        """Return the steps whose checkpoints are whole there, oldest first.

        Raises:
            RemoteStoreError: The store can't be read.
        """
        return sorted(step for step, names in self._folders().items() if MANIFEST in names)

    def torn(self) -> list[int]:
        """Return the steps of which there is something, but no manifest: an upload or a removal was interrupted."""
        return sorted(step for step, names in self._folders().items() if not names & {MANIFEST, _SUPERSEDED})

    def superseded(self) -> list[int]:
        """Return the steps whose checkpoints count no longer, because a run went on from an earlier one."""
        return sorted(step for step, names in self._folders().items() if _SUPERSEDED in names and MANIFEST not in names)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedObjectError: It is damaged.
            RemoteStoreError: It can't be read.
        """
        file = f"{self.address_of(step)}/{MANIFEST}"

        def attempt() -> Manifest:
            with self._told("read"):
                content = self._fs.cat_file(self._path(step, MANIFEST))
            try:
                return Manifest.parse(content.decode(errors="replace"), file)
            except ManifestError as error:
                raise DamagedObjectError(str(error)) from error

        return self._retried(attempt, f"reading {file}")

    def address_of(self, step: int) -> str:
        """Return the address of a checkpoint."""
        return f"{self.address}/{CHECKPOINTS}/{folder_name(step)}"

    # ------------------------------------------------------------------ whose it is

    def claim(self, run: str) -> str | None:
        """Write down that a run writes here from now on; return who did before, in words, if that was another run.

        The run that did finds out at its next upload, and stops (`require_owner`).

        Args:
            run: A name that no other run has.
        """
        before = self._owner()
        mine = {
            "run": run,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%FT%TZ", time.gmtime()),
        }
        with self._told("written to"):
            self._make_room_for(f"{self._root}/{OWNER}")
            self._fs.pipe_file(f"{self._root}/{OWNER}", json.dumps(mine, indent=1).encode())
        if before is None or before.get("run") == run:
            return None
        return _in_words(before)

    def require_owner(self, run: str) -> None:
        """Check that no other run has claimed the store meanwhile.

        Raises:
            UnsendableError: One has.
        """
        owner = self._owner() or {}
        if owner.get("run") != run:
            raise UnsendableError(
                f"another run writes to {self.address} by now: {_in_words(owner)}. This one uploads nothing more; give "
                f"each run a {KEY} of its own"
            )

    def supersede(self, steps: Iterable[int]) -> None:
        """Let checkpoints count no longer, because their steps are made again; their files stay for now.

        Args:
            steps: Whose; what does not count anyway is left as it is.
        """
        for step in sorted({*steps} & {*self.steps()}):
            with self._told("written to"):
                self._fs.pipe_file(self._path(step, _SUPERSEDED), self._fs.cat_file(self._path(step, MANIFEST)))
            self._delete(self._path(step, MANIFEST))

    def _owner(self) -> dict[str, Any] | None:
        try:
            with self._told("read"):
                content = self._fs.cat_file(f"{self._root}/{OWNER}")
        except MissingObjectError:
            return None
        try:
            found = json.loads(content)
        except ValueError as error:
            raise RemoteStoreError(
                f"{self.address}/{OWNER} is damaged: {error}. Remove it, if the store is this run's"
            ) from error
        return found if isinstance(found, dict) else {}

    # ------------------------------------------------------------------ there and back

    def upload(self, folder: Path, step: int, beside: Mapping[str, Path], run: str | None = None) -> None:
        """Send a checkpoint; what is there already, with the same hash in its manifest, is not sent again.

        A run that claims the store meanwhile is found out before the next file, and before the manifest.

        Args:
            folder: The checkpoint's, with its manifest; it stays as it is meanwhile.
            step: Whose it is.
            beside: Files of the run that go on with it, by their name below `run/`; missing ones are left out.
            run: The name that the store was claimed with; None if nobody else writes there.

        Raises:
            UnsendableError: A file has changed since its manifest was written, or another run has claimed the store.
            RemoteStoreError: A file could not be sent, or arrived with another size.
            GivenUpError: `give_up` was set.
        """
        manifest = Manifest.read(folder)
        there = self.manifest(step).files if step in self.steps() else {}
        missing = [name for name, entry in manifest.files.items() if there.get(name) != entry]
        if there and missing:
            self._delete(self._path(step, MANIFEST))

        def send(name: str) -> None:
            self._require(run)
            self._send(folder / name, self._path(step, name), manifest.files[name])

        self._require(run)
        in_threads(send, missing, _PARALLEL, "checkpoint-store")
        for name, file in beside.items():
            if file.is_file():
                self._send(file, f"{self._root}/{RUN}/{name}", None)
        self._require(run)
        self._write(self._path(step, MANIFEST), manifest.text.encode())

    def _require(self, run: str | None) -> None:
        if run is not None:
            self.require_owner(run)

    def fetch(self, step: int, folder: Path) -> None:
        """Fetch a checkpoint into an empty folder, and check every file against its manifest.

        A file that arrives with other bytes is fetched again: a connection that ends early looks like damage once.

        Raises:
            DamagedObjectError: A file is not what the manifest says.
            MissingObjectError: A file is not there.
            RemoteStoreError: A file could not be fetched.
            OSError: The folder can't be written to.
        """
        manifest = self.manifest(step)

        def fetched(name: str) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._receive(self._path(step, name), target, manifest.files[name])

        in_threads(fetched, manifest.files, _PARALLEL, "checkpoint-store")
        manifest.write(folder)

    def fetch_beside(self, names: Iterable[str], folder: Path) -> list[str]:
        """Fetch files of the run that lie beside its checkpoints; return the names of those that were there."""
        with self._told("read"):
            there = {PurePosixPath(path).name for path in self._listed(f"{self._root}/{RUN}")}
        fetched = [name for name in names if name in there]
        for name in fetched:
            self._receive(f"{self._root}/{RUN}/{name}", folder / name, None)
        return fetched

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        if step in self.steps():
            self._delete(self._path(step, MANIFEST))
        with self._told("cleaned up"):
            self._fs.rm(f"{self._root}/{CHECKPOINTS}/{folder_name(step)}", recursive=True)

    def _send(self, file: Path, path: str, expected: FileDigest | None) -> None:
        def attempt() -> None:
            self._require_time()  # before the object is opened: closing it would publish an empty one
            with self._told("written to"):
                self._make_room_for(path)
            with file.open("rb") as source, self._opened(path, "wb") as target:
                found = self._copied(source.read, partial(self._ask, "written to", target.write))
            if expected is not None and found != expected:
                raise UnsendableError(
                    f"{file} has changed since it was saved: {_difference(expected, found)}; it is not uploaded"
                )
            if (size := self._size(path)) != found.size:
                raise RemoteStoreError(f"{path} has {size:,} bytes in the store, where {found.size:,} were sent")
            self.transfers.nbytes += found.size

        self._retried(attempt, f"sending {file} to {self.address}")

    def _receive(self, path: str, file: Path, expected: FileDigest | None) -> None:
        def attempt() -> None:
            with file.open("wb") as target:
                with self._opened(path, "rb") as source:
                    found = self._copied(partial(self._ask, "read", source.read), target.write)
                target.flush()
                os.fsync(target.fileno())
            if expected is not None and found != expected:
                raise DamagedObjectError(f"{path} in {self.address} is damaged: {_difference(expected, found)}")
            if expected is None and (size := self._size(path)) != found.size:
                raise RemoteStoreError(f"{path} has {size:,} bytes in the store, of which {found.size:,} arrived")
            self.transfers.nbytes += found.size

        self._retried(attempt, f"fetching {path} from {self.address}")

    def _size(self, path: str) -> int:
        with self._told("read"):
            return int(self._fs.info(path)["size"])

    @contextmanager
    def _opened(self, path: str, mode: str) -> Iterator[IO[bytes]]:
        """Open an object; errors of the disk in the block stay what they are, those of closing it are the store's."""
        what = "read" if mode == "rb" else "written to"
        with self._told(what):
            opened = self._fs.open(path, mode)
        try:
            yield opened
        finally:
            with self._told(what):
                opened.close()

    def _ask(self, what: str, call: Callable[[Any], T], argument: Any) -> T:
        with self._told(what):
            return call(argument)

    def _copied(self, read: Callable[[int], bytes], write: Callable[[bytes], object]) -> FileDigest:
        digest, size = xxh3_128(), 0
        while chunk := read(_CHUNK_BYTES):
            self._require_time()
            digest.update(chunk)
            write(chunk)
            size += len(chunk)
        return FileDigest(size, digest.hexdigest())

    def _require_time(self) -> None:
        if self.give_up.is_set():
            raise GivenUpError(f"the run ended before all of it was in {self.address}")

    def _write(self, path: str, content: bytes) -> None:
        def attempt() -> None:
            with self._told("written to"):
                self._make_room_for(path)
                self._fs.pipe_file(path, content)

        self._retried(attempt, f"writing {path} to {self.address}")

    def _delete(self, path: str) -> None:
        with self._told("cleaned up"):
            self._fs.rm_file(path)

    def _retried(self, attempt: Callable[[], T], what: str) -> T:
        for pause_s in self._pauses_s:
            try:
                return attempt()
            except (GivenUpError, UnsendableError):
                raise
            except RemoteStoreError as error:
                logger.warning("%s failed, and is tried again in %g s: %s", what, pause_s, error)
            self.transfers.retries += 1
            if self.give_up.wait(pause_s):
                raise GivenUpError(f"the run ended before {what} worked")
        return attempt()

    # ------------------------------------------------------------------ paths

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{CHECKPOINTS}/{folder_name(step)}/{name}"

    def _folders(self) -> dict[int, set[str]]:
        """Return what lies directly in the folder of each checkpoint."""
        with self._told("read"):
            folders = self._listed(f"{self._root}/{CHECKPOINTS}")
            return {
                step: {PurePosixPath(inside).name for inside in self._listed(path)}
                for path in folders
                if (step := step_of(PurePosixPath(path).name)) is not None
            }

    def _listed(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [found for found in self._fs.ls(path, detail=False) if PurePosixPath(found) != PurePosixPath(path)]
        except FileNotFoundError:
            return []

    def _make_room_for(self, path: str) -> None:
        """Make the folders above an object, where the store has folders."""
        if self._fs.protocol not in _WITHOUT_FOLDERS:
            self._fs.makedirs(str(PurePosixPath(path).parent), exist_ok=True)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn what a client of a store raises into an error that names the store.

        Args:
            what: What could not be done, as a participle.
        """
        try:
            yield
        except ImportError as error:
            raise RemoteStoreError(f"{self.address} needs a package that is not installed: {error}") from error
        except HrlError:
            raise
        except Exception as error:  # each of fsspec's clients has classes of its own, without a base
            kind, words = type(error).__name__, " ".join(str(error).split())
            said = words if words and isinstance(error, OSError | ValueError) else f"{kind}: {words}".removesuffix(": ")
            told = MissingObjectError if isinstance(error, FileNotFoundError) else RemoteStoreError
            raise told(f"the store {self.address} can't be {what}: {said}; {self._way_out}") from error


def is_in_store(path: str | None) -> bool:
    """Return whether a path of the configuration is an address."""
    return "://" in (path or "")


def _require_plain(address: str, key: str) -> None:
    """Refuse an address that may hold a secret, before anything shows it.

    Args:
        address: Of a store, or of what lies in it.
        key: Which configures it.

    Raises:
        RemoteStoreError: It holds a login, or more than a path.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise RemoteStoreError(f"{key} is no address of a store; write e.g. s3://bucket/folder") from error
    stands_before_a_host = parts.scheme in ("hdfs", "abfs", "abfss") and parts.password is None
    if "@" in parts.netloc and not stands_before_a_host:
        holds = "a login"
    elif parts.query or parts.fragment:  # such as a signature; a file's name would come behind it
        holds = f"what follows a {'?' if parts.query else '#'}, which is no part of a folder's name"
    else:
        return
    raise RemoteStoreError(
        f"{key} holds {holds}: credentials stand in the environment or in the store's own files, never in an address, "
        "which is written to logs"
    )


def named_checkpoint(address: str) -> tuple[RemoteStore, int]:
    """Return the store and the step of the address of a checkpoint, as `RemoteStore.address_of` writes it.

    Raises:
        RemoteStoreError: It is no such address, or `RemoteStore` refuses it.
    """
    _require_plain(address, _RESUMED)
    folder, _, name = address.rstrip("/").rpartition("/")
    store, _, above = folder.rpartition("/")
    step = step_of(name)
    if not store or above != CHECKPOINTS or step is None:
        raise RemoteStoreError(
            f"{_RESUMED}={address} is no checkpoint in a store; write e.g. "
            f"s3://bucket/folder/{CHECKPOINTS}/{folder_name(20)}"
        )
    return RemoteStore(store, _RESUMED), step


_WITHOUT_FOLDERS = ("s3", "gcs", "abfs")


def _file_system(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of an address, and the path in it.

    S3, Google's and Azure's stores go through Arrow, which hrl needs for Parquet anyway; all others are fsspec's own.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    parts = urlsplit(address)
    path = f"{parts.netloc}{parts.path}"
    if parts.scheme in ("s3", "s3a"):
        # Arrow itself doesn't read these variables, which every other client of S3 does.
        endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")
        return ArrowFSWrapper(
            fs.S3FileSystem(
                endpoint_override=endpoint.netloc or None,
                scheme=endpoint.scheme or None,
                connect_timeout=10,
            )
        ), path
    if parts.scheme in ("gs", "gcs"):
        return ArrowFSWrapper(fs.GcsFileSystem(retry_time_limit=timedelta(seconds=60))), path
    if parts.scheme in ("abfs", "abfss"):
        return ArrowFSWrapper(fs.AzureFileSystem(account_name=os.environ.get("AZURE_STORAGE_ACCOUNT", ""))), path
    system, root = fsspec.core.url_to_fs(address)
    return system, str(root).rstrip("/")


def _in_words(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"


def _difference(expected: FileDigest, found: FileDigest) -> str:
    if expected.size != found.size:
        return f"{found.size:,} bytes, where its manifest says {expected.size:,}"
    return f"its bytes are not those of its manifest (xxh3 {found.xxh3_128}, not {expected.xxh3_128})"
