"""Compiled loops that sort an edge list into the rows of a CSR matrix.

An entry of a row is the code 2 * neighbour + direction; the direction is 1 where the list has the
larger node first.  A thread owns a range of rows: nobody else writes there, and results do not
depend on how many threads there are.
"""

import numpy as np

from herta_gpu.backends.cpu.kernels.simd import inline, kernel, prefetch

_SHORT = 64  # entries up to which all pairs are compared
_BLOCK = 512  # edges whose entries are picked out together, in the first cache


@inline
def _note(i, row, other, back, e, rows, codes, edges):  # type: ignore[no-untyped-def]
    rows[i] = row
    if codes is not None:
        codes[i] = 2 * other + back
    if edges is not None:
        edges[i] = e


@inline
def _pick(ends, w, begin, end, first, last, rows, codes, edges):  # type: ignore[no-untyped-def]
    """The entries of rows first..last from edges begin..end, one behind the other.

    Which edges are ours is random: a branch would be guessed wrongly half of the time.
    """
    found, width = 0, np.uint64(last - first)
    for e in range(begin, end):
        u, v = np.int64(ends[0, e]), np.int64(ends[1, e])
        back, wanted = np.int64(u > v), np.int64(u != v)
        if w is not None:
            wanted &= np.int64(w[e] != 0)
        _note(found, u, v, back, e, rows, codes, edges)
        found += wanted & np.int64(np.uint64(u - first) < width)
        _note(found, v, u, back, e, rows, codes, edges)
        found += wanted & np.int64(np.uint64(v - first) < width)
    return found


@kernel
def count(ends, w, first, last, indptr):  # type: ignore[no-untyped-def]
    """Add to indptr[i + 1] how many entries row i, first <= i < last, gets from these edges."""
    m, rows = ends.shape[1], np.empty(2 * _BLOCK + 2, ends.dtype)
    for begin in range(0, m, _BLOCK):
        end = min(begin + _BLOCK, m)
        for i in range(_pick(ends, w, begin, end, first, last, rows, None, None)):
            indptr[np.int64(rows[i]) + 1] += 1


@kernel
def starts(indptr):  # type: ignore[no-untyped-def]
    """The counts of `count` become the places where the rows start; gives their sum."""
    total = 0
    for i in range(1, indptr.shape[0]):
        here = indptr[i]
        indptr[i] = total
        total += here
    return total


@kernel
def scatter(ends, w, first, last, indptr, base, codes, weights, loops):  # type: ignore[no-untyped-def]
    """Put each entry into its row; indptr[i + 1] moves from the start of row i to its end.

    The entry numbered `base` is the first of `codes` and `weights`.
    """
    m, size = ends.shape[1], 2 * _BLOCK + 2
    rows, picked = np.empty(size, ends.dtype), np.empty(size, ends.dtype)
    place, edges = np.empty(size, np.int64), None if w is None else np.empty(size, np.int64)
    for begin in range(0, m, _BLOCK):
        end = min(begin + _BLOCK, m)
        found = _pick(ends, w, begin, end, first, last, rows, picked, edges)
        for i in range(found):
            row = np.int64(rows[i]) + 1
            at = indptr[row]
            indptr[row] = at + 1
            place[i] = at - base
            prefetch(codes, at - base, None, None)
        for i in range(found):
            codes[place[i]] = picked[i]
            if weights is not None:
                weights[place[i]] = w[edges[i]]
    if loops is not None:
        for e in range(m):
            if ends[0, e] == ends[1, e] and first <= ends[0, e] < last:
                loops[ends[0, e]] += w[e]


@inline
def _sort_short(codes, weights, a, b, keys, spare, spare_weights):  # type: ignore[no-untyped-def]
    """Each code's place is the number of smaller ones: no branch, and as many pairs at once as a
    register holds.  A code is followed by its position: no two are equal then."""
    for i in range(b - a):
        keys[i] = np.int64(codes[a + i]) * _SHORT + i
        spare[i] = codes[a + i]
        if weights is not None:
            spare_weights[i] = weights[a + i]
    for i in range(b - a):
        key, at = keys[i], a
        for j in range(b - a):
            at += np.int64(keys[j] < key)
        codes[at] = spare[i]
        if weights is not None:
            weights[at] = spare_weights[i]


@kernel
def sort(codes, weights, a, b, keys, spare, spare_weights):  # type: ignore[no-untyped-def]
    """Sort codes[a:b], and weights with them; equal codes keep their order.

    The spare arrays hold half as many numbers, `_SHORT` at least.
    """
    if b - a <= _SHORT:
        _sort_short(codes, weights, a, b, keys, spare, spare_weights)
        return
    middle = (a + b) // 2
    sort(codes, weights, a, middle, keys, spare, spare_weights)
    sort(codes, weights, middle, b, keys, spare, spare_weights)
    if codes[middle - 1] <= codes[middle]:
        return
    left = middle - a
    for i in range(left):
        spare[i] = codes[a + i]
        if weights is not None:
            spare_weights[i] = weights[a + i]
    i, j, at = 0, middle, a
    while i < left:
        if j < b and codes[j] < spare[i]:
            codes[at] = codes[j]
            if weights is not None:
                weights[at] = weights[j]
            j += 1
        else:
            codes[at] = spare[i]
            if weights is not None:
                weights[at] = spare_weights[i]
            i += 1
        at += 1


@inline
def spares(indptr, first, last, start, codes):  # type: ignore[no-untyped-def]
    """What `sort` needs for the rows from `first` to `last`, which begin at `start`."""
    most = 0
    for i in range(first, last):
        most = max(most, indptr[i + 1] - start)
        start = indptr[i + 1]
    half = most // 2 + _SHORT
    return np.empty(_SHORT, np.int64), np.empty(half, codes.dtype), half


@kernel
def merge(indptr, base, codes, first, last, start):  # type: ignore[no-untyped-def]
    """Rows first..last sorted, with each neighbour once, one row behind the other from `start`.

    Afterwards `codes` holds neighbours, and indptr[i + 1] the end of row i.  Gives the end of all.
    """
    keys, spare, _ = spares(indptr, first, last, start, codes)
    at, begin = start - base, start - base
    for i in range(first, last):
        end = indptr[i + 1] - base
        sort(codes, None, begin, end, keys, spare, None)
        before = np.int64(-1)
        for e in range(begin, end):
            v = np.int64(codes[e]) >> 1
            if v != before:
                codes[at] = v
                at += 1
                before = v
        indptr[i + 1] = at + base
        begin = end
    return at + base


@inline
def _total(x, a, b):  # type: ignore[no-untyped-def]
    """The sum of x[a:b], one by one, as numpy.bincount adds up."""
    total = 0.0
    for i in range(a, b):
        total += x[i]
    return total


@kernel
def merge_weighted(indptr, base, codes, weights, first, last, start, clash):  # type: ignore[no-untyped-def]
    """As `merge`; weights of one direction add up, and those of both must be the same.

    `clash` becomes (weight ahead, weight back) of the first edge for which they are not; the
    answer is then (row, neighbour, True), else (end, unequal weights of 1, False).
    """
    keys, spare, half = spares(indptr, first, last, start, codes)
    spare_weights = np.empty(half)
    at, begin, others = start - base, start - base, np.int64(0)
    for i in range(first, last):
        end = indptr[i + 1] - base
        sort(codes, weights, begin, end, keys, spare, spare_weights)
        e = begin
        while e < end:
            v, middle = np.int64(codes[e]) >> 1, e
            while middle < end and codes[middle] == 2 * v:
                middle += 1
            stop = middle
            while stop < end and codes[stop] == 2 * v + 1:
                stop += 1
            ahead = _total(weights, e, middle)
            back = _total(weights, middle, stop)
            if e < middle < stop and i < v and abs(ahead - back) > 1e-6 * back:
                clash[0], clash[1] = ahead, back
                return i, v, True
            codes[at], weights[at] = v, ahead if e < middle else back
            others += weights[at] != 1
            at += 1
            e = stop
        indptr[i + 1] = at + base
        begin = end
    return at + base, others, False


@kernel
def move(x, to, start, end):  # type: ignore[no-untyped-def]
    """x[to:] = x[start:end] with to <= start; NumPy would copy what overlaps."""
    for e in range(start, end):
        x[to + e - start] = x[e]
