"""`hrl watch`: the page of a run in a browser, following the run while it goes on."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.commands.argument_types import port


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run and the port."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--port", type=port, default=0, help="the port on 127.0.0.1; a free one by default")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="an address of this machine that no other machine reaches; from elsewhere, forward the port with ssh -L",
    )


def run(options: Namespace) -> int:
    """Serve the page until the run has ended or Ctrl-C."""
    from hrl.report.page_server import LiveView
    from hrl.report.run_folder import checked_run_folder

    with LiveView(checked_run_folder(options.folder), host=options.host, port=options.port) as view:
        sys.stdout.write(f"{view.address}  (Ctrl-C ends it)\n")
        sys.stdout.flush()
        view.wait()
    sys.stdout.write(f"the run has ended; its report is {view.folder / 'report.html'}\n")
    return 0
