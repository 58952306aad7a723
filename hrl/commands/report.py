"""`hrl report`: the page of a run, written anew, or a page that compares several runs."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Add the runs, and the file to write."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run folder; several are compared")
    parser.add_argument(
        "--out", type=Path, help="the file to write; by default report.html in the run folder, and comparison.html here"
    )


def run(options: Namespace) -> int:
    """Write the page and say where it is."""
    from hrl.files import expanded, write_whole
    from hrl.report.compare import compare_page
    from hrl.report.html_report import render, run_page
    from hrl.report.run_folder import METRICS, RunFolderError, checked_run_folder

    folders = [checked_run_folder(folder) for folder in options.folders]
    if len(folders) == 1:
        page, default = run_page(folders[0]), folders[0] / "report.html"
    else:
        page, default = compare_page(folders), Path("comparison.html")
    out = default if options.out is None else expanded(options.out)
    if out.is_dir():
        out = out / default.name
    try:
        if out.exists() and not out.is_file():  # a pipe or a device, such as /dev/stdout, which must stay
            out.write_text(render(page), encoding="utf-8")
        else:
            write_whole(out if options.out is None else out.resolve(), render(page))  # `--out` may name a link
    except BrokenPipeError:  # who reads the pipe has seen enough
        raise
    except OSError as error:
        raise RunFolderError(f"{out} can't be written: {error.strerror}; name another file with --out") from error
    (sys.stdout if out.is_file() else sys.stderr).write(f"{out}\n")
    for folder in folders:
        if not (folder / METRICS).exists():
            sys.stderr.write(f"{folder} has no {METRICS}: the run has made no step yet, and has no curves\n")
    return 0
