"""What must hold on ranks with a GPU each, on the real CuPy and the device of tests/cuda_device.

``mpirun -n 3 python -m tests.backends.ranks.gpu_checks`` prints a line of JSON for each check.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np

from herta_gpu import HERTA, Graph
from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import ranks_of
from herta_gpu.backends.ranks.communicator import FEW
from herta_gpu.backends.ranks.nccl import GROUP, Nccl
from herta_gpu.laplacian import RegularizedLaplacian, block_cg, chebyshev
from tests.backends.ranks.checks import COMM, RANK, SIZE, main, of_ranks, raises
from tests.cuda_device.active import DEVICE, cupy

N, D, C, LAM = 150, 6, 3, 2.0


def data() -> tuple[Any, Any, Any, Any]:
    """(edges, X, labels, training mask): a hub of 100 neighbours, which is cut, and lone nodes."""
    rng = np.random.default_rng(7)
    edges = rng.integers(5, N, (2, 2 * N))
    edges = np.concatenate([edges, [np.full(100, 7), np.arange(20, 120)]], axis=1)
    X = rng.standard_normal((N, D))
    return edges, X, rng.integers(0, C, N), np.arange(N) % 3 > 0


def part_of(edges: Any, weight: Any = None, partition: Any = "blocks") -> Any:
    here = None if weight is None else weight[RANK::SIZE]
    how = {"comm": COMM, "split": "nodes", "partition": partition}
    return Graph.from_edges(edges[:, RANK::SIZE], N, here, **how)


def partitions() -> list[Any]:
    """Ranges, nodes dealt like cards, and a rank without a node."""
    return ["blocks", np.arange(N) * 7 % SIZE, np.full(N, SIZE - 1)]


def dense_H(edges: Any, weight: Any = None) -> Any:
    A = np.zeros((N, N))
    for (u, v), w in zip(edges.T, np.ones(edges.shape[1]) if weight is None else weight):
        A[u, v] = A[v, u] = w if u != v else 0
    degree = A.sum(axis=1) + 1
    L = (np.diag(A.sum(axis=1)) - A) / np.sqrt(np.outer(degree, degree))
    return np.eye(N) + LAM * L


def gpu(graph: Any) -> Any:
    return backend_for("cuda", graph, None)


# ---- one GPU for each rank -------------------------------------------------------------------
def check_each_rank_has_a_gpu_of_its_own() -> None:
    part = part_of(data()[0])
    gpu(part)
    runtime = cupy.cuda.runtime
    assert runtime.getDevice() == RANK
    if SIZE == 1:
        return
    try:
        runtime.setDevice(0)
        forget()
        DEVICE.set(devices=SIZE - 1)
        said = raises(ValueError, lambda: HERTA(device="cuda").fit(part, *rows(part)))
        gpus = "1 GPU" if SIZE == 2 else f"{SIZE - 1} GPUs"
        assert said == (
            f"{SIZE} ranks are on the machine of rank 0, which has {gpus} for them: start one rank "
            'per GPU (mpirun -n), or use device="cpu".'
        )
        with warnings.catch_warnings(record=True) as seen, patch("herta_gpu.backends.FEW", 0):
            warnings.simplefilter("always")
            assert backend_for("auto", part, None).name == "cpu"
        assert "goes on with the CPU" in str(seen[0].message)
        # Each rank sees one GPU, and it is another one: as many clusters deal them out.
        DEVICE.set(devices=1)
        forget()
        with patch.object(runtime, "deviceGetPCIBusId", lambda device: f"0000:{RANK:02x}:00.0"):
            assert gpu(part).name == "cuda"
        assert runtime.getDevice() == 0
    finally:
        DEVICE.set(devices=SIZE)
        forget()
    gpu(part)
    assert runtime.getDevice() == RANK


def forget() -> None:
    """No backend has been made and no GPU taken, as in a new process."""
    ranks_of(COMM).nccl = None
    for name, module in [*sys.modules.items()]:
        if name.startswith("herta_gpu.backends"):
            for function in [*vars(module).values()]:
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def rows(part: Any) -> tuple[Any, Any, Any]:
    _, X, y, mask = data()
    return X[part.nodes], y[part.nodes], mask[part.nodes]


# ---- what travels ----------------------------------------------------------------------------
def check_totals_are_added_in_the_order_of_ranks() -> None:
    backend = gpu(part_of(data()[0]))
    if SIZE == 1:
        return
    xp = backend.xp
    for count in (1, 7, FEW, 2 * FEW + 5):
        parts, wanted = of_ranks(count)
        assert (backend.total(xp.asarray(parts[RANK])).get() == wanted).all()
    again = backend.total(xp.asarray(parts[RANK]))  # the same bits in every run
    assert (again.get() == wanted).all()
    ids = backend.total(xp.asarray(np.array([[2**60 + RANK]])))
    assert ids.get().tolist() == [[sum(2**60 + r for r in range(SIZE))]]
    assert backend.total(RANK) == sum(range(SIZE))
    assert backend.largest(xp.asarray(np.array([RANK, -RANK]))).get().tolist() == [SIZE - 1, 0]
    whole = backend.gathered(xp.asarray(np.full((RANK, 2), float(RANK))))
    assert whole.get().tolist() == [[r, r] for r in range(SIZE) for _ in range(r)]
    assert (backend.own(whole).get() == RANK).all()
    made = {"x": xp.asarray(np.arange(RANK)), "y": xp.asarray(np.eye(2))}
    found = backend.nccl.share(made if RANK else {})
    assert [sorted(f) for f in found] == [[], *[["x", "y"]] * (SIZE - 1)]
    assert all((found[r]["x"].get() == np.arange(r)).all() for r in range(1, SIZE))


def check_a_step_of_cg_keeps_the_halo_and_asks_for_little() -> None:
    edges, X, *_ = data()
    if SIZE == 1:
        return
    part, k = part_of(edges), 8
    backend = gpu(part)
    xp, team = backend.xp, ranks_of(COMM)
    with backend.working():
        L = backend.laplacian(part, "float32")
        R = xp.asarray(np.tile(X, 2)[part.nodes, :k].astype("float32"))
        state = backend.cg_start(L, LAM, R, xp.zeros(k), 1e-6, 1e-7)
        backend.cg_step(L, LAM, state)  # the first one allocates
        DEVICE.clear()
        backend.cg_step(L, LAM, state)
        found = DEVICE.ledger()
        sent = sum(map(len, part.halo.send))
        # apply_H, cg_descend, pack_rows, cg_turn, and cg_direction twice; two sums and the halo.
        assert found["launches"] == sum(found["kernels"].values()) == 6, found
        assert found["library_calls"] == 3  # all of NCCL's
        assert not any(found[name] for name in ("waits", "copies_in", "copies_out", "copies_on"))
        assert found["bytes_sent"] == 2 * 8 * k * (SIZE - 1) + 4 * k * sent
        for _ in range(3):
            backend.cg_step(L, LAM, state)
        P = state.G.get()
        scalars = [getattr(state, a).get() for a in ("rho", "energy", "alpha", "beta", "active")]
    # The halo of P is what its owners have, bit by bit, though it was never sent.
    assert (part.halo.extended(P[: L.n])[L.n :] == P[L.n :]).all()
    assert all((a == b).all() for other in team.each(scalars) for a, b in zip(other, scalars))


# ---- solves and fits -------------------------------------------------------------------------
def check_products_and_solves_are_those_of_dense_algebra() -> None:
    rng = np.random.default_rng(3)
    edges = np.unique(np.sort(data()[0], axis=0), axis=1)
    edges = edges[:, edges[0] < edges[1]]
    for i, partition in enumerate(partitions()):
        weight = rng.random(edges.shape[1]) + 0.5 if i else None
        part, H_dense = part_of(edges, weight, partition), dense_H(edges, weight)
        backend, at = gpu(part), part.nodes
        for dtype, tol, k in (("float64", 1e-12, 5), ("float32", 1e-5, 8))[: 2 - i % 2]:
            B = rng.standard_normal((N, k)).astype(dtype)
            exact = np.linalg.solve(H_dense, B)

            def error(found: Any, true: Any, here: Any = at) -> float:
                return float(np.abs(found.get() - true[here]).max(initial=0.0))

            with backend.working():
                H, mine = RegularizedLaplacian(part, LAM, backend, dtype), backend.asarray(B[at])
                assert error(H.apply(mine), H_dense @ B) < tol
                R, dots = H.residual(mine, mine)
                true = B - H_dense @ B
                assert error(R, true) < 1e-12
                assert np.allclose(dots.get()[0], (true**2).sum(axis=0), rtol=1e-12)
                assert error(chebyshev(H, mine, 32), exact) < tol
                Z, info = block_cg(H, mine, 1e-7)
                assert info.status == "converged"
                assert error(Z, exact) < 1e-6


def check_fits_are_those_of_one_process() -> None:
    edges, X, y, mask = data()
    whole, team = Graph.from_edges(edges, N), ranks_of(COMM)
    fits = [
        {"lam": 5.0, "dtype": "float64", "tol": 1e-10},
        {"lam": 5.0, "loss": "ce", "ridge": 0.1},
        {"lam": 1.0, "strategy": "herta", "ridge": 0.1, "tol": 1e-4},
        {"lam": 1.0, "loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-3},
    ]
    for params, partition in zip(fits, [*partitions(), "blocks"], strict=True):
        part = part_of(edges, None, partition)
        one = HERTA(**params, sparsify=False, device="cpu-scipy").fit(whole, X, y, mask)
        model = HERTA(**params, sparsify=False, device="cuda").fit(part, *rows(part))
        assert model.status_ == one.status_ == "certified", params
        assert model.device_.choice == "cuda"
        loss, true = model.history_[-1]["loss"], one.history_[-1]["loss"]
        assert abs(loss - true) <= 3 * params.get("tol", 1e-6) * true, params
        close = 1e-7 if "dtype" in params else 2 * params.get("tol", 1e-6) ** 0.5
        assert np.abs(model.W_ - one.W_).max() <= close * np.abs(one.W_).max(), params
        assert all((W == model.W_).all() for W in team.each(model.W_))
        F, here = one.transform(whole, X), model.transform(part, X[part.nodes])
        scale = np.abs(F).max()
        assert np.abs(here - F[part.nodes]).max(initial=0) <= (close + 1e-4) * scale, params


def check_columns_are_shared_by_nccl_to_the_same_bits() -> None:
    edges, X, y, mask = data()
    X = np.tile(X, 3) + np.random.default_rng(0).standard_normal((N, 3 * D))
    whole, shared = Graph.from_edges(edges, N), Graph.from_edges(edges, N).on_ranks(COMM)
    params = {"lam": 5.0, "ridge": 0.1, "device": "cuda", "memory_budget": "1GB"}
    one = HERTA(**params).fit(whole, X, y, mask)
    DEVICE.clear()
    model = HERTA(**params).fit(shared, X, y, mask)
    same = one.plan_.recipe.blocks(X.shape[1]) == model.plan_.recipe.blocks(X.shape[1])
    assert (model.W_ == one.W_).all() or not same
    assert np.abs(model.W_ - one.W_).max() <= 1e-3 * np.abs(one.W_).max()
    if SIZE > 1:
        assert DEVICE.ledger()["bytes_sent"] > 0
        _without_nccl(lambda: _columns_by_the_host(model, params, shared))


def _columns_by_the_host(model: HERTA, params: Any, shared: Any) -> None:
    _, X, y, mask = data()
    X = np.tile(X, 3) + np.random.default_rng(0).standard_normal((N, 3 * D))
    DEVICE.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again = HERTA(**params).fit(shared, X, y, mask)
    assert (again.W_ == model.W_).all()
    assert DEVICE.ledger()["bytes_sent"] == 0
    said = [str(w.message) for w in seen if "Blocks go through the host" in str(w.message)]
    assert bool(said) == (RANK == 0)


def _without_nccl(action: Any) -> None:
    team = ranks_of(COMM)
    before, team.nccl = team.nccl, None
    with patch.object(cupy.cuda.nccl, "available", False):
        action()
    team.nccl = before


# ---- faults ----------------------------------------------------------------------------------
def check_what_cannot_be_done_is_said() -> None:
    if SIZE == 1:
        return
    part = part_of(data()[0])
    gpu(part)
    fit = HERTA(device="cuda").fit
    without: list[str] = []
    _without_nccl(lambda: without.append(raises(ValueError, lambda: fit(part, *rows(part)))))
    assert without[0].startswith("NCCL, which GPUs of several processes need, cannot be loaded")
    said = raises(ValueError, lambda: HERTA(device="cuda", sparsify=True).fit(part, *rows(part)))
    assert said.startswith("sparsify does not work on GPUs on a graph that is split by nodes")
    backend = gpu(part)
    for name in ("sketch_incidence", "sketch_identity", "edge_scores"):
        assert "Algorithm 2" in raises(ValueError, getattr(backend, name))


def check_an_error_on_one_rank_ends_all_and_life_goes_on() -> None:
    """The others wait on their devices for a sum that will not come."""
    if SIZE == 1:
        return
    part = part_of(data()[0])
    kind, steps = type(gpu(part)), []
    step = kind.cg_step

    def failing(self: Any, *args: Any) -> None:
        steps.append(1)
        if RANK == SIZE - 1 and len(steps) == 3:
            raise MemoryError("no more memory on one of the GPUs")
        step(self, *args)

    model = HERTA(lam=5.0, strategy="herta", device="cuda")
    with patch.object(kind, "cg_step", failing):
        said = raises(MemoryError, lambda: model.fit(part, *rows(part)))
    assert f"Rank {SIZE - 1}: " in said
    assert "no more memory on one of the GPUs" in said
    assert HERTA(lam=5.0, device="cuda").fit(part, *rows(part)).status_ == "certified"


def check_ranks_that_go_other_ways_are_found() -> None:
    if SIZE == 1:
        return
    backend, team = gpu(part_of(data()[0])), ranks_of(COMM)
    x = backend.xp.zeros(3)
    team.debug = True
    try:
        other = backend.total if RANK else backend.gathered
        assert "a branch was taken" in raises(RuntimeError, lambda: in_together(other, x))
    finally:
        team.debug = False
    assert backend.total(backend.xp.ones(2)).get().tolist() == [SIZE, SIZE]


def in_together(action: Any, *args: Any) -> None:
    with ranks_of(COMM).together():
        action(*args)


# ---- NCCL ------------------------------------------------------------------------------------
def check_nccl_refuses_what_it_punishes() -> None:
    if SIZE == 1:
        return
    backend, library = gpu(part_of(data()[0])), cupy.cuda.nccl
    wire, x = backend.nccl, backend.xp.ones(4)
    wire.total(x)  # the communicator has begun
    comm, here = wire._comm, backend.xp.cuda.get_current_stream().ptr
    call = (x.data.ptr, 8, library.NCCL_UINT8, (RANK + 1) % SIZE, here)
    library.groupStart()
    for _ in range(GROUP + 1):
        comm.send(*call)
    raises(library.NcclError, library.groupEnd)
    raises(library.NcclError, library.groupEnd)  # of no group
    cupy.cuda.runtime.setDevice(0)
    try:
        key = ranks_of(COMM).agree(library.get_unique_id())
        raises(library.NcclError, lambda: library.NcclCommunicator(SIZE, key, RANK))
    finally:
        cupy.cuda.runtime.setDevice(RANK)
    wire.close()
    assert wire.total(backend.xp.ones(1)).get() == SIZE  # and begins anew


def check_a_group_has_no_more_calls_than_nccl_takes() -> None:
    """3,000 ranks on paper: 2,048 calls in a group at most, both ends of each in the same one."""
    ranks, groups = 3000, {}

    class Recorded:
        NCCL_UINT8 = 1

        def __init__(self, rank: int) -> None:
            self.calls = groups.setdefault(rank, [])

        def groupStart(self) -> None:
            self.calls.append([])

        def groupEnd(self) -> None:
            pass

        def send(self, *args: Any) -> None:
            self.calls[-1].append(("send", args[3]))

        def recv(self, *args: Any) -> None:
            self.calls[-1].append(("recv", args[3]))

    backend = gpu(part_of(data()[0]))
    x = backend.xp.ones(1)
    for rank in (0, 1024, 1025, 2999):
        team = type("Team", (), {"rank": rank, "size": ranks})()
        recorded = Recorded(rank)
        wire = Nccl(team, backend.xp, recorded)  # type: ignore[arg-type]
        with patch.object(Nccl, "_ready", lambda *_, r=recorded: r):
            wire.start([x] * ranks, [x] * ranks, "x")
    assert all(len(group) <= GROUP for calls in groups.values() for group in calls)
    for a in groups:
        for i, group in enumerate(groups[a]):
            assert len(set(group)) == len(group)
            for kind, b in group:
                if b in groups:
                    assert ("recv" if kind == "send" else "send", a) in groups[b][i]


if __name__ == "__main__":
    DEVICE.set(devices=SIZE)
    main(globals())
