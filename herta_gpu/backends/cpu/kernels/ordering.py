"""Compiled label propagation."""

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
