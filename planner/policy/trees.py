"""Fan-out trees: the parent of each target, by position in a line of targets.

The two trees follow P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009). Each of two binary trees carries half of the chunks. A
target has children in at most one tree (the first if its position is even, the second if it is odd), so that
it sends what it receives, once, and no link is overloaded. Both trees are search trees over the positions:
neighbours in the line are neighbours in the trees, and a line sorted by rack crosses racks as rarely as
possible.

N targets have capacity for N + 1: half of a link is left over twice. In large trees it is left at the top,
where late targets, and those that lose their source, find chunks first.
"""

from __future__ import annotations

from typing import Final

ROOT: Final = -1
"""The source that the entire line reads from."""
LARGE: Final = 16
"""Number of targets from which spare capacity is left at the top: it costs one level, which matters in a
short line.
"""


def two_trees(length: int) -> tuple[list[int], list[int]]:
    """Return each target's parent in the first and in the second tree."""
    return _tree(length, 0), _tree(length, 1)


def _tree(length: int, parity: int) -> list[int]:
    """Return a binary search tree whose inner nodes are the positions of one parity; the others are its
    leaves.
    """
    parents = [ROOT] * length
    depths = [0] * length
    inner = range(parity, length, 2)
    begin, end, top, depth = 0, len(inner), ROOT, 0
    if length >= LARGE:
        # An end of the line without a neighbour beyond it: as the root it has one child, and half a link to
        # spare.
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
        # The gap that a leaf fills belongs to the deeper of its two neighbouring inner nodes.
        neighbours = [node for node in (leaf - 1, leaf + 1) if 0 <= node < length]
        parents[leaf] = max(neighbours, key=lambda node: depths[node], default=ROOT)
    return parents
