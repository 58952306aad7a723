"""Samples on a terminal: responses as a table, episodes as conversations, and either as tokens with their origin.

What a text would do to a terminal is spelled out (`readable`), and long ones lose their middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hrl.config.arithmetic import count
from hrl.masking import masked_text
from hrl.report.conversation import Line, Run, conversation, is_episode, runs_of
from hrl.report.samples import Sample, on_one_line, printable, sample_facts, samples_table

OBSERVATION_LIMIT = 400
"""Characters of what is not the policy's that are shown."""
TURN_LIMIT = 1600
"""Characters of a turn of the policy that are shown."""
_LINES = 12
_STYLES = {"assistant": "bold green", "user": "cyan", "tool": "yellow", "system": "bright_black"}
_RUN_STYLES = {"prompt": "bright_black", "environment": "cyan", "policy": "bold green"}
_UNTRAINED = "yellow"
_ERROR = "error"


def samples_shown(samples: Sequence[tuple[str, Sample]], title: str) -> RenderableType:
    """Return labelled samples: those of one response each as a table, episodes as conversations."""
    if not any(is_episode(record) for _, record in samples):
        return samples_table(samples, title)
    return Group(Text(title, style="italic"), *(part for each in samples for part in _conversation(*each)))


def tokens_shown(samples: Sequence[tuple[str, Sample]], title: str) -> RenderableType:
    """Return the tokens of labelled samples, those that are trained on told apart by label and colour."""
    legend = Text("by origin; the policy learns from the tokens of “policy”, and from no others", style="bright_black")
    return Group(Text(title, style="italic"), legend, *(part for each in samples for part in _tokens(*each)))


def _head(label: str, record: Sample) -> Text:
    facts = [on_one_line(f"{name}: {value}", 200) for name, value in sample_facts(record) if name != _ERROR]
    return Text.assemble("\n", (f"{label}  ", "bold"), (" · ".join(facts), "bright_black"))


def _error(record: Sample) -> Iterator[RenderableType]:
    """Yield why an episode failed, if it did."""
    error = dict(sample_facts(record)).get(_ERROR)
    if error is not None:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_row(Text("  error    ", style="red"), folded(masked_text(error), OBSERVATION_LIMIT))
        yield table


def _conversation(label: str, record: Sample) -> Iterator[RenderableType]:
    yield _head(label, record)
    if not is_episode(record):
        record = {"messages": [], "turns": [{"text": record["response"]}], **record}
    yield chat_table(conversation(record))
    yield from _error(record)


def chat_table(lines: Sequence[Line]) -> Table:
    """Return a conversation as rows of role, what was said, and the reward of the turn at the right."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for line in lines:
        reward = Text("" if line.reward is None else f"{line.reward:+.3g}", style="bold")
        role = Text(f"  {on_one_line(line.role, 12)}", style=_STYLES.get(line.role, "magenta"))
        table.add_row(role, _said(line), reward)
    return table


def _said(line: Line) -> Text:
    limit = OBSERVATION_LIMIT if line.turn is None else TURN_LIMIT
    parts = []
    if line.reasoning:
        parts.append(folded(line.reasoning, OBSERVATION_LIMIT).copy())
        parts[-1].stylize("italic bright_black")
    if line.text.strip() or not (line.calls or line.reasoning):
        parts.append(folded(line.text.strip("\n"), limit))
    parts += [Text.assemble(("→ ", "bold"), printable(call, limit=OBSERVATION_LIMIT)) for call in line.calls]
    return Text("\n").join(parts)


def folded(text: str, limit: int) -> Text:
    """Make a text safe to show, without its middle where it has too many lines or characters."""
    rows = text.split("\n")
    if len(rows) > _LINES:
        half = _LINES // 2
        rows = [*rows[:half], f"[… {len(rows) - 2 * half} lines …]", *rows[-half:]]
    return printable("\n".join(rows), limit=limit)


def _tokens(label: str, record: Sample) -> Iterator[RenderableType]:
    yield _head(label, record)
    branches = runs_of(record)
    for number, branch in enumerate(branches):
        if len(branches) > 1:
            yield Text(f"  branch {number}", style="bold")
        yield runs_table(branch)
    yield from _error(record)


def runs_table(runs: Sequence[Run]) -> Table:
    """Return the tokens of a row, a line for each run of one origin."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for run in runs:
        is_untrained = run.origin == "policy" and not run.trained
        style = _UNTRAINED if is_untrained else _RUN_STYLES.get(run.origin, "magenta")
        name = on_one_line(run.origin, 12) + (", not trained" if is_untrained else "")
        tokens = count(run.tokens, "token") if run.tokens else ""
        text = folded(run.text, TURN_LIMIT if run.origin == "policy" else OBSERVATION_LIMIT)
        text.stylize(style)
        table.add_row(Text(f"  {name}", style=style), Text(tokens, style="bright_black"), text)
    return table
