"""The shapes of a fan-out: who stands behind whom, by position in a line of targets.

Source of the two trees: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35 (2009). Each of two binary trees carries half of
the chunks. A target has children in one tree at most (the first if its position is even, the second if
it is odd), so that it sends what it receives, once, and no link is asked for more than it has. Both
trees are search trees over the positions: neighbours in the line are neighbours in the trees, and a
line sorted by rack crosses from rack to rack as seldom as it can.

N targets have room for N + 1: twice, half of a link is left over. In large trees it is left at the top,
where those that come later, or lose their source, find the chunks first.
"""

from __future__ import annotations

from typing import Final

ROOT: Final = -1
"""Stands for the source that the whole line reads from."""
LARGE: Final = 16
"""Targets from which on room is left at the top: it costs a level, which a short line would feel."""


def two_trees(length: int) -> tuple[list[int], list[int]]:
    """Each target's parent in the first and in the second tree."""
    return _tree(length, 0), _tree(length, 1)


def _tree(length: int, parity: int) -> list[int]:
    """A binary search tree whose inner nodes are the positions of one parity; the others are its leaves."""
    parents = [ROOT] * length
    depths = [0] * length
    inner = range(parity, length, 2)
    begin, end, top, depth = 0, len(inner), ROOT, 0
    if length >= LARGE:
        # An end of the line with nobody beyond it: as the root it has one child, and half a link to spare.
        for outer, free in ((0, parity == 0), (len(inner) - 1, inner[-1] == length - 1)):
            if free and begin < end:
                parents[inner[outer]], depths[inner[outer]] = top, depth
                top, depth = inner[outer], depth + 1
                begin, end = (begin + 1, end) if outer == 0 else (begin, end - 1)
    pending_spans = [(begin, end, top, depth)]
    while pending_spans:
        begin, end, parent, depth = pending_spans.pop()
        if begin == end:
            continue
        middle = (begin + end) // 2
        parents[inner[middle]], depths[inner[middle]] = parent, depth
        pending_spans.append((begin, middle, inner[middle], depth + 1))
        pending_spans.append((middle + 1, end, inner[middle], depth + 1))
    for leaf in range(1 - parity, length, 2):
        # The gap that a leaf stands in belongs to the deeper of the two inner nodes beside it.
        neighbours = [node for node in (leaf - 1, leaf + 1) if 0 <= node < length]
        parents[leaf] = max(neighbours, key=lambda node: depths[node], default=ROOT)
    return parents
