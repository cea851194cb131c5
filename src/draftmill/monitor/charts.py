"""Small line charts out of characters, for a terminal. Owns the drawing; knows nothing of runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Dots of a Braille character, by column (0, 1) and row (0 at the top).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ASCII = " .:-=+*#%@"


def line_chart(values: Sequence[float], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """A series as a line, the newest value on the right.

    Args:
        values: finite numbers, oldest first; averaged where there are more than the width can show
        width, height: size in characters
        ascii_only: for a terminal that has no Braille characters: one row of shades, at the bottom

    Returns:
        `height` lines of `width` characters.
    """
    if not values:
        return [" " * width for _ in range(height)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    if ascii_only:
        shades = [_ASCII[1 + round((value - low) / span * (len(_ASCII) - 2))] for value in resample(values, width)]
        return [" " * width] * (height - 1) + ["".join(shades)]
    points = resample(values, 2 * width)
    rows = 4 * height
    heights = [round((value - low) / span * (rows - 1)) if high > low else rows // 2 for value in points]
    cells = [[0] * width for _ in range(height)]
    for at, level in enumerate(heights):
        # A line, not dots: fill up to the middle between this point and the last.
        before = heights[at - 1] if at else level
        for filled in _between(before, level):
            row = rows - 1 - filled
            cells[row // 4][at // 2] |= _DOTS[at % 2][row % 4]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


def _between(before: int, level: int) -> range:
    if before == level:
        return range(level, level + 1)
    return range(before + 1, level + 1) if before < level else range(level, before)


def resample(values: Sequence[float], num_points: int) -> list[float]:
    """Exactly `num_points` values: means of equal stretches where there are more, straight lines where fewer."""
    count = len(values)
    if count >= num_points:
        edges = [count * i // num_points for i in range(num_points + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    points = []
    for i in range(num_points):
        at = i * (count - 1) / max(1, num_points - 1)
        left = min(int(at), count - 1)
        right = min(left + 1, count - 1)
        points.append(values[left] + (values[right] - values[left]) * (at - left))
    return points


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A share of 0..1 as a bar of `width` characters."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if ascii_only:
        return ("#" * (eighths // 8)).ljust(width, ".")
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)
