"""Environments of others, each played with its real package."""

import subprocess
import sys
from pathlib import Path

import pytest

#: Where `make install-dev` puts them.
OTHERS = Path(sys.prefix) / "environments"
PLAYED = Path(__file__).with_name("played_others.py")


@pytest.mark.skipif(not OTHERS.is_dir(), reason="run `make install-dev` for the environments of others")
def test_environments_of_others_are_played_with_their_real_packages():
    options = ["-q", "-p", "no:cacheprovider", "--durations=0"]
    played = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(PLAYED)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert played.returncode == 0, played.stdout
    assert " passed" in played.stdout and "skipped" not in played.stdout, played.stdout
