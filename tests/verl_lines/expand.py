"""The commands that a shell script would run, without running them.

bash itself reads the script, so that variables, arrays, functions and conditions mean what they mean; every program is
replaced by a function that writes down how it was called. The script's own redirections still happen, so give it only
scripts that you have read.
"""

import resource
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which

DEADLINE_S = 30.0
_LARGEST_FILE_BYTES = 1 << 20
_HARMLESS = ("basename", "dirname", "date", "seq", "expr", "tr", "cut", "head", "tail", "grep", "wc", "sort", "cat")
"""Programs whose output scripts build their commands from."""

_PRELUDE = """
command_not_found_handle() {
    printf '%s\\0' "$@" > "$CALLS/$EPOCHREALTIME.$BASHPID"
    [ ! -p /dev/stdin ] || cat > /dev/null  # whoever writes into a pipe finds a reader, as with the real program
}
cd() { :; }; pushd() { :; }; popd() { :; }; source() { :; }; exec() { "$@"; }; wait() { :; }; ulimit() { :; }
python3() { case "${1:-}" in -c|-) return 1;; *) command_not_found_handle python3 "$@";; esac; }
pwd() { printf '%s\n' "$ROOT"; }
python() { python3 "$@"; }
nvidia-smi() { printf 'GPU %d\n' 0 1 2 3 4 5 6 7; }
script=$1; PWD=$ROOT; shift
builtin source "$script" "$@"
"""


def commands_of(
    script: Path, home: Path, variables: Mapping[str, str], arguments: Sequence[str] = ()
) -> list[list[str]]:
    """The programs that `script` calls with their arguments, as far as it comes.

    Args:
        script: a bash script.
        home: what it takes for its working folder. It really runs in a temporary one.
        variables: of its environment, besides HOME and PATH.
        arguments: of the script.

    Returns:
        One list of words for each call, in order. A script that never ends is stopped after `DEADLINE_S`.
    """
    with tempfile.TemporaryDirectory() as folder:
        programs, calls, work = (Path(folder, name) for name in ("bin", "calls", "work"))
        for new in (programs, calls, work):
            new.mkdir()
        for name in _HARMLESS:
            found = which(name)
            if found is not None:
                (programs / name).symlink_to(found)
        environment = {"HOME": "/home/user", "PATH": str(programs), "CALLS": str(calls), "ROOT": str(home), **variables}
        command = [which("bash") or "bash", "--noprofile", "--norc", "-c", _PRELUDE, "bash", str(script.resolve())]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, *arguments],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE_BYTES,) * 2),
                timeout=DEADLINE_S,
                check=False,
            )
        return [path.read_text(errors="replace").split("\0")[:-1] for path in sorted(calls.iterdir())]
