"""A program that talks as a run does, for tests of whoever follows one: `python -m tests.rehearse.talker HOW`."""

import json
import subprocess
import sys
import time

EVENTS = (
    {"event": "stage", "title": "reading the rows"},
    {"event": "stage", "title": "reading the rows", "seconds": 0.5},
    {"event": "banner", "title": "a run", "facts": {}},
    {"event": "stage", "title": "starting Ray"},
    {"event": "stage", "title": "starting Ray", "now": "still"},
    {"event": "stage", "title": "starting Ray", "seconds": 2.0},
    {"event": "stage", "title": "loading actor"},
    {"event": "stage", "title": "loading actor", "seconds": 3.0},
    {"event": "stage", "title": "giving the engine the weights"},
    {"event": "stage", "title": "giving the engine the weights", "seconds": 0.5},
    {"event": "stage", "title": "validating"},
    {"event": "stage", "title": "validating", "seconds": 1.0},
    {"event": "validation", "step": 0, "val/sums/mean@1": 0.25},
    {"event": "step", "step": 1, "timing_s/step": 1.5, "timing_s/gen": 1.0, "timing_s/adv": 0.001},
    {"event": "step", "step": 2, "timing_s/step": 1.5, "timing_s/gen": 1.0},
)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(how: str) -> int:
    """Say some of the events, then end, fail, or wait."""
    for event in EVENTS[: 6 if how == "fails" else None]:
        _say(json.dumps(event))
    _say('{"event": "step", "of": "the reward"}')
    _say("a print of the reward")
    if how == "fails":
        sys.stderr.write("SomeError: the port is taken\n")
        return 3
    if how == "waits":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
