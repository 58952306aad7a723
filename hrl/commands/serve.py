"""`hrl serve`: a model for programs that speak OpenAI's protocol, on this machine alone."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.commands.argument_types import at_least_one, port, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add model, address, key, record and limits."""
    parser.add_argument("model", help="run folder, checkpoint, model folder, hub id or bundled:...")
    parser.add_argument(
        "keys", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine, such as rollout.name=hf"
    )
    parser.add_argument("--host", default="127.0.0.1", help="an address of this machine; 127.0.0.1 by default")
    parser.add_argument("--port", type=port, default=0, help="the port; a free one by default")
    parser.add_argument(
        "--allow-remote", action="store_true", help="let the address be one that other machines reach; not encrypted"
    )
    parser.add_argument(
        "--key-file", type=Path, help="a file with the key; by default HRL_SERVE_KEY, or a new key that is shown"
    )
    parser.add_argument("--name", help="what clients call the model; its short name by default")
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep what was said there, with all tokens; see `hrl rollouts`"
    )
    limits = parser.add_argument_group("limits of each session")
    limits.add_argument("--session-calls", type=at_least_one, help="answers; no limit by default")
    limits.add_argument("--session-tokens", type=at_least_one, help="sampled tokens; no limit by default")
    limits.add_argument("--session-seconds", type=positive, help="from its first call on; no limit by default")
    limits.add_argument(
        "--session-concurrent", type=at_least_one, default=64, help="answers at the same time; 64 by default"
    )
    parser.add_argument(
        "--body-mib", type=positive, default=8.0, help="the largest body of a request in MiB; 8 by default"
    )


def run(options: Namespace) -> int:
    """Serve until Ctrl-C, and return 0."""
    from hrl.processes.signals import interrupt_on_signals
    from hrl.serve.sessions import Limits
    from hrl.trained.serving import Serving, serve

    interrupt_on_signals()
    serving = Serving(
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        key_file=options.key_file,
        name=options.name,
        record=options.record,
        limits=Limits(
            calls=options.session_calls,
            tokens=options.session_tokens,
            seconds=options.session_seconds,
            concurrent_calls=options.session_concurrent,
        ),
        body_bytes=int(options.body_mib * 2**20),
    )
    serve(options.model, serving, options.keys, _say)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
