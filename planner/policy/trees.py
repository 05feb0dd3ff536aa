"""Fan-out trees: the parent of each target, by position in a line of targets.

The two trees follow P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009). Each of two binary trees carries half of the chunks. A
target has children in at most one tree (the first if its position is even, the second if it is odd), so that
it sends what it receives, once, and no link is overloaded. Both trees are search trees over the positions:
neighbours in the line are neighbours in the trees, and a line sorted by rack crosses racks as rarely as
possible.

N targets have capacity for N + 1. Of an even number, the first and the last target each have one child, and
half of a link left over. Of an odd number, the last target is a leaf in both trees, below these two, and has
a link to spare. Both are as near to the top as they can be without another level, because late targets, and
those that lose their source, read there. If other targets are expected to follow, both are the roots, and the
last of an odd number is inserted elsewhere: each link between the source and these targets delays them all.

The last chunk reaches both children of an inner node at half the rate of a link, while targets that are nearer to
the source have nothing left to send. If the last level is sparse, enough of them are leaves of the level above:
they send the last chunk to one of each two children on the last level (`last_chunk_parents`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

SPARSE_LEVEL: Final = 1.4
"""Ratio of inner nodes to those above their last level up to which the last level of the tree is sparse."""
NO_SPARE: Final = -1
"""Depth of spare capacity in a part of the tree that has none."""
ROOT: Final = -1
"""The source that the entire line reads from."""


def two_trees(length: int, *, spare_at_top: bool = False, keep_depth: bool = False) -> tuple[list[int], list[int]]:
    """Return each target's parent in the first and in the second tree.

    `spare_at_top`: the targets with spare capacity are the roots, which may cost one level; if the number is odd,
    the last target leaves that capacity to others, unless `keep_depth` and that would cost another level.
    """
    if length == 1:
        return [ROOT], [ROOT]
    even = length - length % 2
    first = _tree(even, spare_at_top)
    # The second tree is the mirror image of the first.
    second = [parent if parent == ROOT else even - 1 - parent for parent in reversed(first)]
    if even < length and not (spare_at_top and _insert_last(first, second, keep_depth=keep_depth)):
        first.append(0)
        second.append(even - 1)
    return first, second


def last_chunk_parents(parents: list[int], other: list[int]) -> dict[int, int]:
    """Return the targets that read their last chunk in this tree from another parent, with that parent.

    It is a leaf of the level above that serves no target on the last level of the other tree. Empty if there are not
    enough of them for the last level to end earlier.
    """
    depths, other_depths = _depths(parents), _depths(other)
    last = max(depths, default=0)
    children = Counter(parents[position] for position, depth in enumerate(depths) if depth == last)
    inner, found = set(parents), dict[int, int]()
    waiting: list[int] = []
    unused: list[int] = []
    for position, depth in enumerate(depths):
        if depth == last and children[parents[position]] == 2:
            children[parents[position]] = 1  # the other child keeps its parent
            waiting.append(position)
        elif depth == last - 1 and position not in inner and other_depths[position] < last - 1:
            unused.append(position)
        if waiting and unused:  # neighbours in the line
            found[waiting.pop()] = unused.pop()
    return {} if waiting else found


def _insert_last(first: list[int], second: list[int], *, keep_depth: bool) -> bool:
    """Insert one more target above a leaf of each tree; return False if that is impossible.

    It reads the first half in place of a leaf of the first tree, and serves that leaf; it reads the second half
    from this leaf, which is an inner node of the second tree, in place of one of its children. The leaf and the
    child are those with the fewest links to the source.
    """
    depths = _depths(first), _depths(second)
    links, _, leaf, child = min(
        (max(depths[0][second[child]], depths[1][child]), -child, second[child], child)
        for child in range(0, len(first), 2)
        if second[child] != ROOT
    )
    if keep_depth and links == max(depths[0]):
        return False
    added = len(first)
    first.append(first[leaf])
    second.append(leaf)
    first[leaf] = second[child] = added
    return True


def _depths(parents: list[int]) -> list[int]:
    """Return the number of links from the source to each target."""
    depths = [0] * len(parents)
    for position in range(len(parents)):
        path = [position]
        while not depths[path[-1]] and parents[path[-1]] != ROOT:
            path.append(parents[path[-1]])
        for node in reversed(path):
            depths[node] = depths[node] or (1 if parents[node] == ROOT else depths[parents[node]] + 1)
    return depths


def _tree(length: int, spare_at_top: bool) -> list[int]:
    """Return a binary search tree whose inner nodes are the even positions, and the odd ones their leaves.

    Position 0 has no left child: half of its link is left over.
    """
    parents = [ROOT] * length
    depths = [0] * length
    inner = length // 2
    levels = inner.bit_length() + spare_at_top
    spare_depth = 0 if spare_at_top or not inner else _spare_depth(inner, levels)
    pending_spans = [(0, inner, ROOT, levels, spare_depth)]
    while pending_spans:
        begin, end, parent, levels, spare_depth = pending_spans.pop()
        if begin == end:
            continue
        middle = (begin + end) // 2
        if spare_depth >= 0:
            middle = begin + _left_size(end - begin, levels, spare_depth)
        position = 2 * middle
        parents[position] = parent
        depths[position] = 0 if parent == ROOT else depths[parent] + 1
        pending_spans.append((begin, middle, position, levels - 1, spare_depth - 1))
        pending_spans.append((middle + 1, end, position, levels - 1, NO_SPARE))
    for leaf in range(1, length, 2):
        # The gap that a leaf fills belongs to the deeper of its two neighbouring inner nodes.
        neighbours = [node for node in (leaf - 1, leaf + 1) if node < length]
        parents[leaf] = max(neighbours, key=lambda node: depths[node])
    return parents


def _spare_depth(size: int, levels: int) -> int:
    """Return the lowest depth at which the first of the inner nodes can lack its left child without another level.

    If the last level can be sparse (see `last_chunk_parents`), it stays so.
    """
    half = 1 << levels - 1
    limits: list[float] = [2 * half - (half >> depth) for depth in range(levels)]
    if size <= SPARSE_LEVEL * half:
        limits = [min(limit, SPARSE_LEVEL * (half - (half >> depth + 1))) for depth, limit in enumerate(limits)]
    return next(depth for depth, limit in enumerate(limits) if size <= limit)


def _left_size(size: int, levels: int, spare_depth: int) -> int:
    """Return how many of the inner nodes of a span are left of its root, so that its first node is at this depth."""
    if spare_depth == 0:
        return 0
    half = 1 << levels - 1
    # The left part has one level less, and its first node is at one depth less.
    return min(max(size // 2, size - half), half - (half >> spare_depth))
