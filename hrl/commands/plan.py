"""`hrl plan`: what a step would take on other hardware, and which layout is best; starts nothing.

It takes the launch line of a run: `hrl plan grpo key=value …`, `hrl plan python -m hrl.trainer.main_ppo key=value …`.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from hrl.commands.argument_types import at_least_one, not_negative, positive, share
from hrl.processes.imports import quick_imports


def add_arguments(parser: ArgumentParser) -> None:
    """Add the hardware and what is known of the rows."""
    parser.add_argument("--gpus", type=at_least_one, metavar="N", help="number of devices; otherwise the line's own")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="a card such as h100, b200, a100-40gb, l4 or rtx4090, or cpu: this machine; a wrong name shows all",
    )
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help="mean length of a prompt; half the longest")
    parser.add_argument("--response-tokens", type=positive, metavar="N", help="the same of a response")
    parser.add_argument("--teaching", type=share, default=1.0, metavar="SHARE", help="groups whose rewards differ; 1")
    episodes = parser.add_argument_group("of episodes, as a run's metrics have them")
    episodes.add_argument(
        "--turns", type=positive, metavar="N", help="episode/turns/mean; half of environment.max_turns"
    )
    episodes.add_argument("--turn-tokens", type=positive, metavar="N", help="episode/turn_tokens/mean")
    episodes.add_argument(
        "--environment-tokens",
        type=not_negative,
        metavar="N",
        help="episode/environment_tokens/mean; half of a response",
    )
    episodes.add_argument(
        "--environment-seconds",
        type=not_negative,
        metavar="S",
        help="episode/environment_s/mean; 0",
        dest="environment_s",
    )
    episodes.add_argument(
        "--shared-tokens", type=share, metavar="SHARE", help="actor/shared_tokens; prompts alone", dest="shared"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Plan, and return 0; a line that is not valid or fits no layout is an error with status 2."""
    if options.help:
        parser = ArgumentParser(prog="hrl plan", description=__doc__, add_help=False)
        parser.add_argument("line", nargs="+", metavar="LINE", help="the words of the launch line")
        add_arguments(parser)
        sys.stdout.write(parser.format_help())
        return 0
    from rich.console import Console

    with quick_imports():
        from hrl.plan.hardware import CPU, hardware_named
        from hrl.plan.launch_line import LaunchLine
        from hrl.plan.lengths import Lengths
        from hrl.plan.plan import OF_EPISODES, plan
        from hrl.plan.show import as_data, show

    line = LaunchLine.of(options.overrides)
    wants_cpu = "trainer.device=cpu" in line.arguments
    name = options.gpu or (CPU if wants_cpu or options.gpus is None else "h100")
    of_episodes = {name: getattr(options, name) for name in OF_EPISODES}
    lengths = Lengths(options.prompt_tokens, options.response_tokens, options.teaching, **of_episodes)
    found = plan(line, hardware_named(name), options.gpus, lengths)
    if options.as_json:
        sys.stdout.write(json.dumps(as_data(found), indent=2, ensure_ascii=False) + "\n")
    else:
        show(found, Console(highlight=False))
    return 0
