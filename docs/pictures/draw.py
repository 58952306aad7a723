"""Draw the pictures of the concept pages: `python docs/pictures/draw.py` writes the SVG files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

INK, GREY, BLUE, GREEN, VIOLET, AMBER = "#22303c", "#56646f", "#2f6db5", "#2f7d4f", "#6d4c91", "#a8650a"
PAPER = {INK: "#ffffff", GREY: "#f4f6f8", BLUE: "#eef4fb", GREEN: "#eef7f1", VIOLET: "#f5f0fa", AMBER: "#fdf5e8"}


@dataclass
class Picture:
    """An SVG of boxes, texts and arrows; lengths are in pixels of its own width."""

    name: str
    width: int
    height: int
    says: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: int, y: int, width: int, height: int, text: str = "", colour: str = BLUE, *, bold: bool = False
    ) -> None:
        """Draw a box with centred lines of text."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{PAPER[colour]}" '
            f'stroke="{colour}" stroke-width="1.4"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * 9
        for number, line in enumerate(lines):
            self.text(x + width // 2, int(top + number * 18) + 5, line, anchor="middle", bold=bold and number == 0)

    def text(
        self, x: int, y: int, text: str, colour: str = INK, *, anchor: str = "start", bold: bool = False, size: int = 14
    ) -> None:
        """Write one line; `y` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], colour: str = GREY, dashed: bool = False) -> None:
        """Draw a line through the points with a head at its end."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes} '
            f'marker-end="url(#{colour[1:]})"/>'
        )

    def svg(self) -> str:
        """Return the file's text."""
        heads = "".join(
            f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
            for colour in PAPER
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{escape(self.says)}">',
                f"<defs>{heads}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def step() -> Picture:
    """Return the phases of a step, with the conditions of those that are optional."""
    picture = Picture("step", 980, 400, "The phases of a step, in order, and on which processes they run")
    lanes = {"driver": 60, "engines": 140, "rewards": 220, "models": 300}
    for lane, y in lanes.items():
        picture.box(120, y - 26, 840, 60, "", GREY)
        picture.text(16, y + 8, lane, bold=True)
    # name, where, from the left, colour, when it is left out
    phases = [
        ("gen", "engines", 130, BLUE, ""),
        ("reward", "rewards", 236, BLUE, ""),
        ("old_log_prob", "models", 334, GREY, "if used twice"),
        ("ref", "models", 442, GREY, "if KL"),
        ("values", "models", 550, GREY, "if critic"),
        ("adv", "driver", 652, BLUE, ""),
        ("update", "models", 754, BLUE, ""),
        ("weight_sync", "engines", 856, VIOLET, ""),
    ]
    before: tuple[int, int] | None = None
    for name, lane, x, colour, only in phases:
        y = lanes[lane]
        picture.box(x, y - 18, 90, 42, name, colour)
        if only:
            picture.text(x + 45, y + 52, only, GREY, anchor="middle", size=12)
        if before is not None:
            start, row = before
            if row == y:
                picture.arrow((start, y + 3), (x - 2, y + 3))
            else:
                middle = (start + x) // 2 - 1
                picture.arrow((start, row + 3), (middle, row + 3), (middle, y + 3), (x - 1, y + 3))
        before = (x + 90, y)
    picture.arrow((175, 164), (175, 223), (235, 223), colour=GREEN, dashed=True)
    picture.text(130, 375, "A finished answer is scored while others are still being sampled (dashed).", GREEN, size=13)
    picture.text(960, 375, "grey: only where the algorithm needs it", GREY, anchor="end", size=13)
    return picture


def hybrid_engine() -> Picture:
    """Return one device over time: who uses its memory."""
    picture = Picture(
        "hybrid-engine", 980, 360, "One device over two steps: engine and trainer take turns with its memory"
    )
    picture.text(30, 40, "one device, one process with all roles, one engine as its child", bold=True)
    picture.arrow((150, 330), (960, 330))
    picture.text(960, 352, "time", GREY, anchor="end")
    for y, name in ((90, "engine"), (180, "trainer"), (270, "driver")):
        picture.text(30, y + 6, name, bold=True)
    for offset in (0, 405):
        picture.box(150 + offset, 65, 150, 50, "samples\nweights + cache", GREEN)
        picture.box(304 + offset, 65, 170, 50, "sleeps", GREY)
        picture.box(478 + offset, 65, 72, 50, "wakes\nloads", VIOLET)
        picture.box(150 + offset, 155, 150, 50, "idle, or in\nhost memory", GREY)
        picture.box(304 + offset, 155, 170, 50, "log-probs, update\ngradients + moments", BLUE)
        picture.box(478 + offset, 155, 72, 50, "sends\nweights", VIOLET)
        picture.box(150 + offset, 245, 150, 50, "waits for rewards", GREY)
        picture.box(304 + offset, 245, 60, 50, "adv", AMBER)
        picture.box(368 + offset, 245, 182, 50, "calls the next phase", GREY)
        picture.arrow((514 + offset, 153), (514 + offset, 118), colour=VIOLET)
    return picture


def weight_sync() -> Picture:
    """Return the conversation of a weight sync."""
    picture = Picture(
        "weight-sync", 980, 400, "A weight sync: manifest, buckets with checksums, the engine's answer, commit"
    )
    picture.box(40, 30, 220, 60, "trainer's rank\nshards in float32", BLUE, bold=True)
    picture.box(720, 30, 220, 60, "engine\nwhole model in bfloat16", GREEN, bold=True)
    rows = [
        (130, "begin: names, shapes, dtypes, version", True, "must be idle"),
        (180, "bucket 0: cast, gathered, with checksums", True, "loads bucket 0"),
        (230, "bucket 1, gathered while bucket 0 is loaded", True, "loads bucket 1"),
        (280, "what was written, tensor by tensor", False, "answers"),
        (330, "commit: version 7", True, "serves version 7"),
    ]
    picture.parts.append(f'<path d="M150 90 L150 385 M830 90 L830 385" stroke="{GREY}" stroke-dasharray="3 4"/>')
    for y, text, forwards, _ in rows:
        start, end = (156, 824) if forwards else (824, 156)
        picture.arrow((start, y), (end, y), colour=VIOLET)
        picture.text(490, y - 8, text, anchor="middle")
    for y, _, _, does in rows:
        picture.text(840, y + 5, does, GREY, size=13)
    picture.text(
        490, 380, "missing, left over, different or late: abort, with the tensor's name", AMBER, anchor="middle"
    )
    return picture


def one_gradient() -> Picture:
    """Return a mini-batch cut in two ways."""
    picture = Picture("one-gradient", 980, 330, "A mini-batch cut in two ways: the sums add up to the same gradient")
    lengths = [90, 150, 60, 120, 180, 75]
    for top, title, cuts in (
        (70, "one process, two micro-batches", ((0, 3), (3, 6))),
        (190, "two processes, two micro-batches each", ((0, 1), (1, 2), (2, 4), (4, 6))),
    ):
        picture.text(30, top - 16, title, bold=True)
        x = 30
        for number, (first, last) in enumerate(cuts):
            width = sum(lengths[first:last]) + 6 * (last - first)
            picture.box(x, top, width, 50, "", (BLUE, GREEN)[number % 2])
            inner = x + 4
            for length in lengths[first:last]:
                picture.box(inner, top + 10, length - 2, 30, "", INK)
                inner += length + 4
            picture.text(x + width // 2, top + 68, "sum, count", GREY, anchor="middle", size=12)
            x += width + 10
        picture.arrow((x, top + 25), (x + 30, top + 25))
    picture.box(800, 110, 160, 76, "sum of sums\n÷ sum of counts\n= one gradient", VIOLET)
    picture.text(
        30, 310, "Rows as long as their tokens; nothing is padded, and no micro-batch divides by itself.", GREY
    )
    return picture


def main() -> None:
    """Write every picture."""
    for picture in (step(), hybrid_engine(), weight_sync(), one_gradient()):
        Path(__file__).with_name(f"{picture.name}.svg").write_text(picture.svg())


if __name__ == "__main__":
    main()
