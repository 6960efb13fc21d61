"""Compiled loops of plumbing/building.py: communities, components, other orders of the rows."""

import numpy as np

from herta_gpu.backends.cpu.kernels.building import sort, spares
from herta_gpu.backends.cpu.kernels.simd import kernel


@kernel
def propagate(indptr, indices, labels, sizes, counts, most):  # type: ignore[no-untyped-def]
    """One round over all nodes in turn; gives how many directed edges have equal labels at both
    ends, as each node saw it.  `counts` is zero before and after."""
    inside = 0
    for i in range(labels.shape[0]):
        first, last = indptr[i], indptr[i + 1]
        mine = labels[i]
        best, votes = mine, 0
        for e in range(first, last):
            label = labels[indices[e]]
            counts[label] += 1
            if counts[label] > votes and (label == mine or sizes[label] < most):
                best, votes = label, counts[label]
        if counts[mine] >= votes:
            best, votes = mine, counts[mine]
        for e in range(first, last):
            counts[labels[indices[e]]] = 0
        inside += votes
        if best != mine:
            sizes[mine] -= 1
            sizes[best] += 1
            labels[i] = best
    return inside


@kernel
def join(indptr, indices, label):  # type: ignore[no-untyped-def]
    """label[i], which is i before, becomes the least node of i's component; gives their number.

    Trees of labels: each points to a smaller one, and the ends of an edge get one root.
    """
    for i in range(label.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] < i:  # each edge once
                a, b = _root(label, i), _root(label, indices[e])
                label[max(a, b)] = min(a, b)
    roots = 0
    for i in range(label.shape[0]):
        roots += label[i] == i
        label[i] = label[label[i]]  # a smaller one's is its root already
    return roots


@kernel
def _root(label, i):  # type: ignore[no-untyped-def]
    while label[i] != i:
        label[i] = label[label[i]]  # half the way for whoever comes next
        i = label[i]
    return i


@kernel
def permute(old_indptr, old, old_weights, p, inverse, indptr, indices, weights, first, last):  # type: ignore[no-untyped-def]
    """Rows first..last of the graph with node p[i] in row i, whose `indptr` is known."""
    keys, spare, half = spares(indptr, first, last, indptr[first], indices)
    spare_weights = None if weights is None else np.empty(half, np.float64)
    for i in range(first, last):
        at = indptr[i]
        for e in range(old_indptr[p[i]], old_indptr[p[i] + 1]):
            indices[at] = inverse[old[e]]
            if weights is not None:
                weights[at] = old_weights[e]
            at += 1
        sort(indices, weights, indptr[i], indptr[i + 1], keys, spare, spare_weights)
