"""What must hold on any number of ranks: ``mpirun -n 3 python -m tests.backends.ranks.checks``.

Prints a line of JSON for each check: its name, and what went wrong, if anything.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pickle
import shutil
import tempfile
import traceback
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from mpi4py import MPI

from herta_gpu import HERTA, Graph, LabelPropagation, effective_dimension
from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import ranks_of
from herta_gpu.backends.ranks.communicator import FEW
from herta_gpu.datasets import Dataset
from herta_gpu.laplacian import RegularizedLaplacian, block_cg, chebyshev
from herta_gpu.plumbing.partition import rows_moved
from tests.sharing import compile_kernels_once

compile_kernels_once()
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
N, D, C = 400, 200, 3  # 200 columns are 4 blocks of 50 in one process and on 2 or 4 ranks


def raises(kind: type[Exception], function: Any) -> str:
    """The sentence that ends `function` on every rank."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} on rank {RANK}")


def data(d: int = D) -> tuple[Any, Any, Any, Any]:
    """(edges, X, labels, training nodes), the same on every rank; node 0 has no edge."""
    rng = np.random.default_rng(5)
    edges, X = rng.integers(1, N, (2, 3 * N)), rng.standard_normal((N, d))
    return edges, X, rng.integers(0, C, N), np.arange(0, N, 2) if d < N // 2 else np.arange(N)


def share(edges: Any) -> Any:
    """This rank's edges: all but the last rank have some."""
    return edges[:, RANK :: max(1, SIZE - 1)] if max(1, SIZE - 1) > RANK else edges[:, :0]


def dense_rows(edges: Any, X: Any, lam: float) -> Any:
    """H^-1 X from the definition."""
    A = np.zeros((N, N))
    A[edges[0], edges[1]] = A[edges[1], edges[0]] = 1
    np.fill_diagonal(A, 0)
    degree = A.sum(axis=1) + 1
    L = (np.diag(A.sum(axis=1)) - A) / np.sqrt(np.outer(degree, degree))
    return np.linalg.solve(np.eye(N) + lam * L, X)


def of_ranks(count: int) -> tuple[list[Any], Any]:
    """Numbers of each rank in units of its own, and their sum in the order of the ranks."""
    rngs = map(np.random.default_rng, range(SIZE))
    parts = [rng.standard_normal(count) * 10.0 ** (3 * r) for r, rng in enumerate(rngs)]
    return parts, reduce(np.add, parts)


# ---- what ranks say to each other ------------------------------------------------------------
def check_totals_are_added_in_the_order_of_ranks() -> None:
    team = ranks_of(COMM)
    for count in (1, 7, FEW, FEW + 1, 3 * FEW + 5):
        parts, wanted = of_ranks(count)
        assert (team.total(parts[RANK]) == wanted).all()
    assert team.total(0.1 * RANK) == sum(0.1 * r for r in range(SIZE))
    assert team.total(np.ones((0, 3))).shape == (0, 3)
    assert type(team.total(RANK)) is int


def check_largest_agreed_and_rows() -> None:
    team = ranks_of(COMM)
    assert team.largest(float(RANK)) == SIZE - 1
    assert (team.largest(np.array([RANK, -RANK])) == [SIZE - 1, 0]).all()
    assert team.agree({"rank": RANK, "x": np.arange(3)})["rank"] == 0
    whole, at = team.gather(np.full((RANK, 2), RANK))
    assert whole.tolist() == [[r, r] for r in range(SIZE) for _ in range(r)]
    assert (whole[at] == RANK).all()
    assert at.stop - at.start == RANK
    got = team.exchange_rows([np.full((r + RANK, 1), 10 * RANK + r) for r in range(SIZE)])
    for r, part in enumerate(got):
        assert part.shape == (r + RANK, 1)
        assert (part == 10 * r + RANK).all()
    made = team.share({"x": np.arange(RANK)} if RANK else {})
    assert [sorted(found) for found in made] == [[]] + [["x"]] * (SIZE - 1)
    assert all((made[r]["x"] == np.arange(r)).all() for r in range(1, SIZE))


def check_a_communicator_has_one_team() -> None:
    assert ranks_of(COMM) is ranks_of(COMM)
    assert "comm must be" in raises(TypeError, lambda: ranks_of("world"))


# ---- graphs ----------------------------------------------------------------------------------
def check_shares_of_edges_are_one_graph() -> None:
    edges, *_ = data()
    whole, parts = Graph.from_edges(edges, N), Graph.from_edges(share(edges), N, comm=COMM)
    assert (whole.indptr == parts.indptr).all()
    assert (whole.indices == parts.indices).all()
    weight = np.random.default_rng(1).random(edges.shape[1]) + 0.5
    edges = edges[:, edges[0] < edges[1]]
    weight = weight[: edges.shape[1]]
    whole = Graph.from_edges(edges, N, weight)
    parts = Graph.from_edges(share(edges), N, share(weight[None])[0], comm=COMM)
    assert np.allclose(whole.weights, parts.weights, rtol=1e-15)
    assert Graph.from_edges(share(edges), comm=COMM).num_nodes == int(edges.max()) + 1


def check_a_copy_of_a_graph_is_alone() -> None:
    graph = Graph.from_edges(share(data()[0]), N, comm=COMM)
    assert graph.team is not None
    assert graph.reordered("degree").team is graph.team
    assert pickle.loads(pickle.dumps(graph)).team is None


# ---- fits ------------------------------------------------------------------------------------
_FITS = [
    {"lam": 20.0},
    {"lam": 5.0, "loss": "ce", "ridge": 0.1},
    {"lam": 5.0, "strategy": "herta"},
    {"lam": 2.0, "strategy": "herta", "sparsify": True, "sketch": True, "ridge": 0.1},
    {"lam": 2.0, "strategy": "herta", "sparsify": "degree", "random_state": 3},
    {"lam": 2.0, "loss": "ce", "ridge": 0.1, "optimizer": "momentum", "strategy": "herta"},
]  # fmt: skip


def check_the_same_blocks_give_the_bits_of_one_process() -> None:
    edges, X, y, train = data()
    alone, shared = Graph.from_edges(edges, N), Graph.from_edges(share(edges), N, comm=COMM)
    for params in _FITS:
        one = HERTA(**params, memory_budget="1GB").fit(alone, X, y, train)
        all_ = HERTA(**params, memory_budget="1GB").fit(shared, X, y, train)
        same = one.plan_.recipe.blocks(D) == all_.plan_.recipe.blocks(D)
        assert same == (SIZE in (1, 2, 4)), params
        assert one.status_ == all_.status_, params
        if same:
            assert (one.W_ == all_.W_).all(), params
        close = 2 * np.sqrt(1e-6) * np.abs(one.W_).max()
        assert np.abs(one.W_ - all_.W_).max() <= close, params
        assert (one.predict(alone, X) == all_.predict(shared, X)).mean() > 0.995, params


def check_two_fits_have_the_same_bits_on_all_ranks() -> None:
    edges, X, y, train = data(30)
    graph, team = Graph.from_edges(share(edges), N, comm=COMM), ranks_of(COMM)
    first, again = (HERTA(lam=5.0, sparsify=True).fit(graph, X, y, train).W_ for _ in range(2))
    assert (first == again).all()
    assert all((other == first).all() for other in team.each(first))


# ---- split by nodes --------------------------------------------------------------------------
def partitions() -> list[Any]:
    """Ranges, METIS or nodes dealt like cards, and all nodes on the last rank."""
    scattered = "metis" if find_spec("pymetis") else np.arange(N) * 7 % SIZE
    return ["blocks", scattered, np.full(N, SIZE - 1)]


def parts(edges: Any, weight: Any = None, partition: Any = "blocks") -> Graph:
    here = None if weight is None else share(weight[None])[0]
    how = {"comm": COMM, "split": "nodes", "partition": partition}
    return Graph.from_edges(share(edges), N, here, **how)


def weighted_edges() -> tuple[Any, Any]:
    """Each edge once, with a weight, and two self-loops."""
    u, v, _ = Graph.from_edges(data()[0], N).edges()
    edges = np.concatenate([[u, v], [[3, 5], [3, 5]]], axis=1)
    return edges, np.random.default_rng(2).random(edges.shape[1]) + 0.5


def both_splits(edges: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """A graph that the ranks have by columns and by nodes, with the nodes that this one has."""
    part = parts(edges)
    return (Graph.from_edges(share(edges), N, comm=COMM), slice(None)), (part, part.nodes)


def check_least_squares_is_that_of_dense_algebra() -> None:
    for d, ridge, text in ((7, 0.0, False), (30, 0.5, True), (1, 0.0, False)):
        edges, X, y, train = data(d)
        mask = np.isin(np.arange(N), train[: N // 4])  # the last ranks have no training node
        labels = np.array(["a", "bb", "ccc"])[y] if text else y
        A = dense_rows(edges, X, 3.0)
        P, Y = A[mask].T @ A[mask] + ridge * np.eye(d), np.eye(C)[y[mask]]
        W = np.linalg.solve(P, A[mask].T @ Y)
        right = np.mean((A @ W).argmax(axis=1) == y)
        for graph, at in both_splits(edges):
            model = HERTA(lam=3.0, ridge=ridge, dtype="float64", tol=1e-10)
            model.fit(graph, sp.csr_array(X[at]) if text else X[at], labels[at], mask[at])
            assert np.abs(model.W_ - W).max() <= 1e-7 * np.abs(W).max()
            off = np.abs(model.transform(graph, X[at]) - (A @ W)[at]).max(initial=0)
            assert off <= 1e-5 * np.abs(A @ W).max()
            assert model.score(graph, X[at], labels[at]) == right


def check_fewer_rows_than_features() -> None:
    edges, X, y, _ = data(150)
    mask = np.arange(N) % 5 == 0
    for ridge in (0.0, 0.1):
        one = HERTA(lam=1.0, ridge=ridge).fit(Graph.from_edges(edges, N), X, y, mask)
        for graph, at in both_splits(edges):
            model = HERTA(lam=1.0, ridge=ridge).fit(graph, X[at], y[at], mask[at])
            assert model.status_ == one.status_
            assert np.abs(model.W_ - one.W_).max() <= 1e-4 * np.abs(one.W_).max()


def check_products_and_solves_of_parts() -> None:
    rng = np.random.default_rng(3)
    edges, weight = weighted_edges()
    for w, partition in itertools.product((None, weight), partitions()):
        whole, part = Graph.from_edges(edges, N, w), parts(edges, w, partition)
        assert part.num_edges == whole.num_edges
        assert abs(part.lambda_max_bound - whole.lambda_max_bound) < 1e-14
        dense = np.eye(N) + 5.0 * whole.to_csr().toarray()
        kinds = [("float64", 1e-12, 5)]
        if w is None and str(partition) == "blocks":  # each kind takes some seconds to compile
            kinds += [("float32", 2e-5, 17), ("float64", 1e-12, 1)]
        for dtype, tol, k in kinds:
            H = RegularizedLaplacian(part, 5.0, backend_for("cpu", part, None), dtype)
            B = rng.standard_normal((N, k)).astype(dtype)
            mine = B[part.nodes]
            assert np.abs(H.apply(mine) - (dense @ B)[part.nodes]).max(initial=0) < tol
            R, dots = H.residual(mine, mine)
            true = B - dense @ B
            assert np.abs(R - true[part.nodes]).max(initial=0) < 1e-12
            assert np.allclose(dots[0], (true**2).sum(axis=0), rtol=1e-12)
            Z = chebyshev(H, mine, 60)
            exact = np.linalg.solve(dense, B)
            assert np.abs(Z - exact[part.nodes]).max(initial=0) < tol
            Z, info = block_cg(H, mine, 1e-10)
            assert info.status == "converged"
            assert np.abs(Z - exact[part.nodes]).max(initial=0) < 1e-8


def check_fits_of_parts_are_those_of_the_whole() -> None:
    edges, X, y, train = data(40)
    mask = np.zeros(N, dtype=bool)
    mask[train] = True
    whole = Graph.from_edges(edges, N)
    more = ({"lam": 5.0, "ridge": 0.1}, {"lam": 2.0, "loss": "ce", "ridge": 0.1})
    fits = [*_FITS[:3], *({"strategy": "herta", **params} for params in more)]
    for i, params in enumerate(fits):
        one = HERTA(**params, sparsify=False).fit(whole, X, y, train)
        for partition in partitions() if i == 0 else partitions()[i % 3 :][:1]:
            part = parts(edges, None, partition)
            at = part.nodes
            model = HERTA(**params).fit(part, X[at], y[at], mask[at])
            assert model.status_ == one.status_ == "certified", params
            loss = abs(model.history_[-1]["loss"] - one.history_[-1]["loss"])
            assert loss <= 3e-6 * one.history_[-1]["loss"], params
            wrong = (one.predict(whole, X)[at] != model.predict(part, X[at])).sum()
            assert wrong <= 0.01 * N, params
            assert abs(model.score(part, X[at], y[at]) - one.score(whole, X, y)) < 0.01
            assert all((W == model.W_).all() for W in ranks_of(COMM).each(model.W_))


def check_what_parts_cannot_do_is_said() -> None:
    if SIZE == 1:
        return
    edges, X, y, _ = data(30)
    part = parts(edges)
    at = part.nodes
    said = raises(ValueError, lambda: HERTA(reorder=True).fit(part, X[at], y[at]))
    assert "split by nodes" in said
    assert "split by nodes" in raises(ValueError, part.to_csr)
    assert "split by nodes" in raises(ValueError, lambda: LabelPropagation().fit(part, y[at]))
    assert "split by nodes" in raises(ValueError, lambda: effective_dimension(part, 1.0))
    assert "install numba" in raises(
        ValueError, lambda: HERTA(device="cpu-scipy").fit(part, X[at], y[at])
    )
    unlabelled = np.full(N, -1)
    said = raises(ValueError, lambda: HERTA().fit(part, X[at], unlabelled[at]))
    assert "There is no training node" in said, said


def check_parts_of_a_graph_that_all_have() -> None:
    """Rows of a whole graph, in memory or in files, are those that an exchange of edges gives."""
    edges, weight = weighted_edges()
    for w, partition in itertools.product((None, weight), partitions()):
        whole, part = Graph.from_edges(edges, N, w), parts(edges, w, partition)
        rows = whole.on_ranks(COMM, "nodes", partition)
        assert rows.num_edges == whole.num_edges
        assert (rows.indptr == part.indptr).all()
        assert (rows.indices == part.indices).all()
        assert np.allclose(rows.degree, whole.degree[part.nodes], rtol=1e-15)
        assert np.allclose(rows.loopless_degree, whole.loopless_degree[part.nodes], rtol=1e-15)
        assert rows.lambda_max_bound == part.lambda_max_bound
        named = np.array([f"node {i}" for i in range(N)])
        assert (rows.gathered(named[rows.nodes]) == named).all()
        moved = rows_moved(whole, SIZE, partition)
        halo = getattr(rows, "halo", None)
        assert moved == ranks_of(COMM).total(0 if halo is None else halo.size) / N


def check_rows_of_a_dataset() -> None:
    """Each rank's rows, from memory or from files, with the columns of all ranks made standard."""
    edges, X, y, train = data(7)
    folder = Path(ranks_of(COMM).agree(tempfile.mkdtemp() if RANK == 0 else None))
    if RANK == 0:
        np.save(folder / "X.npy", X)
        Graph.from_edges(edges, N).save(folder / "graph")
    COMM.Barrier()
    mapped = (Graph.open(folder / "graph"), np.load(folder / "X.npy", mmap_mode="r"))
    for (graph, given), partition in itertools.product(
        [(Graph.from_edges(edges, N), X), (Graph.from_edges(edges, N), sp.csr_array(X)), mapped],
        partitions(),
    ):
        whole = Dataset("all", graph, given, y, {"train": train, "test": np.arange(1, N, 2)})
        part = whole.rows_of(graph.on_ranks(COMM, "nodes", partition))
        at = np.arange(N)[part.graph.nodes]
        assert (at[part.split["train"]] == train[np.isin(train, at)]).all()
        assert (part.y == y[at]).all()
        wanted, made = whole.normalized("standard").X[at], part.normalized("standard").X
        assert np.abs(made - wanted).max() < 1e-13 if at.size else made.shape == wanted.shape
    in_file = whole.rows_of(graph.on_ranks(COMM, "nodes")).X
    assert isinstance(in_file, np.memmap)
    COMM.Barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def check_a_wrong_partition_is_one_sentence() -> None:
    if SIZE == 1:
        return
    team, edges = ranks_of(COMM), data(5)[0]
    folder = Path(team.agree(tempfile.mkdtemp() if RANK == 0 else None))
    good, path = np.arange(N) * 7 % SIZE, folder / "owners.npy"
    wrong = {
        "must name the rank of each of the 400 nodes": np.zeros(N - 1, dtype=int),
        "but holds float64": good.astype(float),
        f"names rank {SIZE}, but there are ranks 0 to {SIZE - 1}": np.full(N, SIZE),
        "names rank -1": good - 1,
        "should have the same partition": np.roll(good, RANK),
    }
    for words, table in wrong.items():
        np.save(folder / f"{RANK}.npy", table)
        for given in (table, folder / f"{RANK}.npy"):
            assert words in raises(ValueError, lambda g=given: parts(edges, None, g)), words
    assert "should have the same partition" in raises(
        ValueError, lambda: parts(edges, None, "metis" if RANK else "blocks")
    )
    assert "There is no partition file" in raises(ValueError, lambda: parts(edges, None, path))
    if RANK == 0:
        path.write_text("0\n1\n")
    team.arrive()
    assert "is not a .npy file" in raises(ValueError, lambda: parts(edges, None, str(path)))
    team.arrive()
    if RANK == 0:
        np.save(path, good)
    team.arrive()
    assert (parts(edges, None, path).nodes == np.flatnonzero(good == RANK)).all()
    if RANK == 0:
        shutil.rmtree(folder)


# ---- faults ----------------------------------------------------------------------------------
def check_an_error_on_one_rank_is_one_on_all() -> None:
    edges, X, y, train = data(30)
    graph = Graph.from_edges(share(edges), N, comm=COMM)
    bad = X.copy()
    if RANK == SIZE - 1:
        bad[3, 1] = np.nan
    said = raises(ValueError, lambda: HERTA().fit(graph, bad, y, train))
    where = f"Rank {SIZE - 1}: " if SIZE > 1 else ""
    assert said == f"{where}X holds NaN or infinity: clean or impute it first."
    assert raises(ValueError, lambda: HERTA(lam=-1).fit(graph, X, y)).startswith("lam must be")

    def stop(record: dict[str, Any]) -> None:
        if RANK == SIZE // 2:
            raise KeyError("the callback of one rank")

    for strategy in ("direct", "herta"):
        wrong = HERTA(lam=5.0, strategy=strategy)
        said = raises(KeyError, lambda m=wrong: m.fit(graph, X, y, train, callback=stop))
        assert "the callback of one rank" in said
    bad_edges = share(edges).copy()
    if RANK == 0:
        bad_edges[0, 0] = N
    said = raises(ValueError, lambda: Graph.from_edges(bad_edges, N, comm=COMM))
    assert f"node id {N}" in said
    assert HERTA(lam=5.0).fit(graph, X, y, train).status_ == "certified"  # and life goes on


def check_errors_within_and_without_other_blocks() -> None:
    """A rank that fails before a block, within it or behind it, while the others are elsewhere."""
    team = ranks_of(COMM)

    def blocks(where: int) -> None:
        with team.together():
            for step in range(4):
                if step == where and RANK == 0:
                    raise OSError(f"between two blocks, at {step}")
                with team.together():
                    team.total(np.ones(10 * FEW))
                    if step == where - 10 and RANK == SIZE - 1:
                        raise OSError(f"in a block, at {step}")
                    team.total(1.0)

    for where in (0, 2, 3, 10, 12, 13):
        words = "in a block" if where >= 10 else "between two blocks"
        assert words in raises(OSError, lambda w=where: blocks(w))
        assert team.total(1) == SIZE


def check_ranks_must_be_given_the_same() -> None:
    if SIZE == 1:
        return
    edges, X, y, train = data(30)
    graph = Graph.from_edges(share(edges), N, comm=COMM)
    fit = HERTA(lam=5.0).fit
    assert "shape of X" in raises(ValueError, lambda: fit(graph, X[:, : 30 - RANK], y, train))
    assert "training nodes" in raises(ValueError, lambda: fit(graph, X, y, train[RANK:]))
    assert "parameters" in raises(ValueError, lambda: HERTA(lam=5.0 + RANK).fit(graph, X, y))
    whole = Graph.from_edges(edges[:, RANK:], N)
    assert "different graphs" in raises(ValueError, lambda: whole.on_ranks(COMM))
    assert "num_nodes" in raises(ValueError, lambda: Graph.from_edges(edges, N + RANK, comm=COMM))


def check_the_debug_mode_finds_what_differs() -> None:
    if SIZE == 1:
        return
    team = ranks_of(COMM)
    team.debug = True
    try:
        team.same(np.ones(3), "ones")
        said = raises(RuntimeError, lambda: team.same(np.full(3, RANK), "numbers"))
        assert said == "Ranks 0 and 1 should have the same numbers, but have not."
        other = team.total if RANK else team.largest
        with_branch = raises(RuntimeError, lambda: other(1.0))
        assert "Rank 0 has come for largest" in with_branch
        assert "rank 1 for total" in with_branch
        edges, X, y, train = data(30)
        graph = Graph.from_edges(share(edges), N, comm=COMM)
        for params in ({"lam": 5.0}, {"lam": 5.0, "strategy": "herta", "sparsify": True}):
            assert HERTA(**params).fit(graph, X, y, train).status_ == "certified"
    finally:
        team.debug = False


def main(found: dict[str, Any]) -> None:
    """Run the checks of a module."""
    checks = [f for name, f in found.items() if name.startswith("check_")]
    asked = os.environ.get("HERTA_CHECKS", "")
    for check in checks:
        if asked not in check.__name__:
            continue
        try:
            # One rank that has all nodes is one process, which it would be compared with.
            if SIZE > 1 or not check.__module__.endswith("node_checks"):
                with ranks_of(COMM).together():
                    check()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        if RANK == 0:
            print(json.dumps({"check": check.__name__, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    node_checks = importlib.import_module("tests.backends.ranks.node_checks")  # which imports this
    main({**globals(), **vars(node_checks)})
