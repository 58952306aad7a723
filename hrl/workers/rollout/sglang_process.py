"""The process of an SGLang engine: SGLang's own `Engine`, asked over a socket by the rank that started it.

Written against release 0.5.23, and run with it on a CPU alone. The engine has a process of its own because it takes
a whole process for itself: it replaces the policy of event loops, sets variables, ends all children of its process at
its shutdown, and its own children end it by a signal. Weights come by hrl's own sync. What a bucket brings is copied
into one flat tensor, whose handle goes to SGLang's scheduler within one of its sessions for new weights.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hrl.errors import HrlError
from hrl.processes.lifetime import die_with_parent
from hrl.processes.messages import encode, open_stream, receive
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.wire import WeightSyncError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

PREFIX = "hrl-"
"""Of the name of weights that a sync has brought; the version follows."""
_READ = ("output_token_logprobs", "finish_reason", "weight_version", "weight_versions")
_LONGEST_ERROR = 2000


class SglangWriter:
    """Writes weights into SGLang's scheduler; see `ModelWriter`. Called in another thread than the engine's.

    Args:
        engine: It.
        loop: The engine's, on which its calls run.

    Attributes:
        version: Of the sync under way.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = engine.tokenizer_manager
        self._loop = loop
        self._is_open = False
        self.version = 0

    def begin(self) -> None:
        """Open a session, in which layers have the form that weights are loaded in."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._call(self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None), "begin_weight_update")
        self._is_open = True

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Have weights loaded.

        Raises:
            WeightSyncError: SGLang refuses them; names the first and the last.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        # A copy: CUDA opens no handle of memory that is itself another process's.
        flat = FlattenedTensorBucket(named_tensors=list(weights))
        parts = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(parts)],
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=f"{PREFIX}{self.version}",
        )
        what = f"update_weights_from_tensor for {weights[0][0]!r} to {weights[-1][0]!r}"
        self._call(self._manager.update_weights_from_tensor(request, None), what)

    def finish(self, kept: Collection[str] = ()) -> None:
        """End the session; what is not sent stays as SGLang has loaded it."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._is_open = False
        self._call(self._manager.end_weight_update(EndWeightUpdateReqInput(), None), "end_weight_update")

    def cancel(self) -> None:
        """End the session, if one is open."""
        if self._is_open:
            self.finish()

    def read_back(self, name: str) -> Tensor | None:
        """Return None: SGLang shows only the first numbers of a weight. `Serving.commit` compares checksums."""
        return None

    def _call(self, call: Coroutine[Any, Any, tuple[bool, str]], what: str) -> None:
        # The sync's deadline, and the end of this process with its parent's, bound the wait.
        success, message = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        if not success:
            raise WeightSyncError(f"SGLang's {what} failed: {message}")


class Serving:
    """Answers what the rank asks.

    Args:
        engine: SGLang's.
        reader: Of the rank's messages.
        writer: To the rank.
    """

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._reader, self._writer = reader, writer
        self._model = SglangWriter(engine, asyncio.get_running_loop())
        self._receiver = WeightReceiver(self._model, "SGLang engine")
        self._thread = ThreadPoolExecutor(1, "sglang-weights")
        self._checksum = self._digest = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until the rank hangs up."""
        while (message := await receive(self._reader)) is not None:
            task = asyncio.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"id": message["id"]}
        try:
            answer["result"] = await getattr(self, message["call"])(*message["args"])
        except WeightSyncError as error:
            answer["sync_error"] = str(error)
        except Exception as error:  # noqa: BLE001 - SGLang raises anything, and the rank has to hear of it
            said = str(error) if isinstance(error, HrlError) else f"{type(error).__name__}: {error}"
            answer["error"] = said[:_LONGEST_ERROR]
        self._writer.write(encode(answer))
        await self._writer.drain()

    # The calls, by the names that the rank has for them.

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample a response; `body` is that of `/generate`."""
        found = await self._engine.async_generate(**body)
        info = found["meta_info"]
        return {"output_ids": found["output_ids"], "meta_info": {name: info[name] for name in _READ if name in info}}

    async def withdraw(self, rid: str) -> None:
        """Stop a request that nobody waits for."""
        self._engine.tokenizer_manager.abort_request(rid)

    async def release(self, tags: list[str]) -> None:
        """Give memory back."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._engine.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        """Take memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def begin(self, manifest: Mapping[str, Any], handle: Mapping[str, Any], version: int) -> None:
        """Announce a sync; see `WeightReceiver.begin`."""
        self._model.version = version
        await self._in_thread(self._receiver.begin, self._receiver.manifest_of(manifest), handle, version)

    async def load(self, index: int) -> None:
        """Take a bucket; see `WeightReceiver.load`."""
        await self._in_thread(self._receiver.load, index)

    async def commit(self) -> dict[str, Any]:
        """Put the weights into effect, drop what was computed with the old ones, and see that they are others.

        Raises:
            WeightSyncError: The cache stays, or the checksum does although other weights were sent.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        report = await self._in_thread(self._receiver.commit)
        manager = self._engine.tokenizer_manager
        flushed = await manager.flush_cache()
        if not flushed.success:
            raise WeightSyncError("SGLang did not drop its cache, so old weights' keys and values would be used")
        success, message, _, checksum = await manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
        if not success or not checksum:
            raise WeightSyncError(f"SGLang names no checksum of its weights: {message}")
        digest = self._receiver.digest
        if self._digest and digest != self._digest and checksum == self._checksum:
            raise WeightSyncError("SGLang's weights have the checksum of those before, although others were sent")
        self._checksum, self._digest = checksum, digest
        return asdict(report)

    async def abort(self) -> dict[str, Any]:
        """Drop a sync; say which version's weights are here, and whether all of them are."""
        intact = await self._in_thread(self._receiver.abort)
        return {"intact": intact, "version": self._receiver.served_version}

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


async def _serve(engine: Engine, connection: socket.socket) -> None:
    reader, writer = await open_stream(connection)
    writer.write(encode({"id": 0, "result": {"version": _version()}}))
    await Serving(engine, reader, writer).run()


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)


def main(connection: socket.socket) -> None:
    """Read the engine's arguments, start it, and answer until the rank hangs up."""
    with connection.makefile("rb") as lines:  # nothing else comes before the answer to this
        arguments = json.loads(lines.readline())
    try:
        from sglang.srt.entrypoints.engine import Engine

        engine = Engine(**arguments)
    except Exception as error:
        connection.sendall(encode({"id": 0, "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}))
        raise SystemExit(1) from error
    try:
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()


if __name__ == "__main__":  # not in the processes that SGLang starts, which import this module under another name
    die_with_parent()
    main(socket.socket(fileno=int(sys.argv[1])))
