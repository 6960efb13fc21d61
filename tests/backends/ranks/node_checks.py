"""What must hold where each rank has its own nodes; `checks` runs these with its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from herta_gpu import HERTA, Checkpoint, Graph, SDDSolver, Sparsifier
from herta_gpu.backends.ranks import ranks_of
from herta_gpu.diffusion import Rows
from tests.backends.ranks.checks import (
    COMM,
    RANK,
    SIZE,
    N,
    data,
    dense_rows,
    partitions,
    parts,
    raises,
    weighted_edges,
)

_SCATTERED = np.arange(N) * 7 % SIZE  # like cards: the training rows of the ranks are mixed
_ALONE = np.where(np.arange(N) % 3 == 0, SIZE - 1, 0)  # with 3 ranks or more some have no node


def with_a_hub() -> Any:
    """Edges of `data` and a node with an edge to every fourth one; node 0 has none."""
    there = np.arange(2, N, 4)
    return np.concatenate([data()[0], [np.full(there.shape[0], 1), there]], axis=1)


def everywhere(x: Any) -> Any:
    """The same object of all ranks, one after the other."""
    return np.concatenate(ranks_of(COMM).each(x))


def shared_folder() -> Path:
    team = ranks_of(COMM)
    return Path(team.agree(tempfile.mkdtemp() if RANK == 0 else None))


# ---- Algorithm 2 -----------------------------------------------------------------------------
def check_samples_do_not_depend_on_the_partition() -> None:
    """The edges that one process draws, with their weights; L_tilde is that of dense algebra."""
    edges, weight = weighted_edges()
    hub = with_a_hub()
    X = np.random.default_rng(1).standard_normal((N, 5))
    cases = [
        (hub, None, _SCATTERED, "sketch", True), (edges, weight, "blocks", "sketch", False),
        (hub, None, _ALONE, "degree", False), (edges, weight, _SCATTERED, "degree", True),
    ]  # fmt: skip
    for e, w, partition, scores, replace in cases:
        how = {"lam": 5.0, "n_samples": 300, "scores": scores, "replace": replace}
        how |= {"dtype": "float64", "random_state": 7}
        one = Sparsifier(**how).fit(Graph.from_edges(e, N, w))
        part = parts(e, w, partition)
        found = Sparsifier(**how).fit(part)
        assert abs(found.n_lambda_ - one.n_lambda_) < 1e-6 * one.n_lambda_
        sampled = found.graph_
        assert sampled.num_edges == one.graph_.num_edges
        u, v, value = sampled.edges()
        ids = getattr(sampled, "ids", np.arange(N))
        listed = np.column_stack([ids[u], ids[v], value])
        listed = everywhere(listed) if SIZE > 1 else listed
        listed = listed[np.lexsort((listed[:, 1], listed[:, 0]))]
        assert np.allclose(listed, np.column_stack(one.graph_.edges()), rtol=1e-6)
        solver = SDDSolver(sampled, lam=5.0, tol=1e-9)
        exact = np.linalg.solve(np.eye(N) + 5.0 * one.graph_.to_csr().toarray(), X)
        Z = solver.solve(X[part.nodes])
        assert solver.info_ is not None
        assert solver.info_.status == "converged"
        assert np.abs(Z - exact[part.nodes]).max(initial=0) < 1e-6


def check_solvers_of_parts() -> None:
    """Extreme units, sparse and narrow B, both methods; the bound holds against dense algebra."""
    edges, X, *_ = data(3)
    part, H = parts(edges, None, _ALONE), np.eye(N) + 4.0 * Graph.from_edges(edges, N).to_csr()
    for B, method, dtype in ((1e-150 * X, "cg", None), (X[:, 0], "cg", "float32"),
                             (X, "chebyshev", "float64")):  # fmt: skip
        solver = SDDSolver(part, lam=4.0, method=method, tol=1e-5)
        Z, exact = solver.solve(B[part.nodes], dtype=dtype), np.linalg.solve(H, B)
        assert solver.info_ is not None
        assert solver.info_.status == "converged"
        assert Z.shape == B[part.nodes].shape
        off = everywhere(Z - exact[part.nodes]) if SIZE > 1 else Z - exact
        order = everywhere(np.arange(N)[part.nodes]) if SIZE > 1 else np.arange(N)
        off, exact = off.reshape(N, -1), exact.reshape(N, -1)[order]
        H_here = np.asarray(H)[np.ix_(order, order)]
        unit = np.abs(exact).max()
        for e, z, bound in zip(off.T / unit, exact.T / unit, solver.info_.h_norm_bound):
            assert e @ H_here @ e <= (bound**2 + 1e-14) * (z @ H_here @ z)


# ---- options ---------------------------------------------------------------------------------
def objective(model: HERTA, A: Any, Y: Any, weight: Any) -> float:
    """By dense algebra, from the definition."""
    Z, ridge = A @ model.W_ + model.intercept_, 0.5 * model.ridge * (model.W_**2).sum()
    if model.loss == "mse":
        return float((weight * 0.5 * ((Z - Y) ** 2).sum(axis=1)).sum() + ridge)
    if model.loss == "bce":
        return float((weight * (np.logaddexp(0, Z) - Y * Z).sum(axis=1)).sum() + ridge)
    shift = Z.max(axis=1)
    size = np.log(np.exp(Z - shift[:, None]).sum(axis=1)) + shift
    return float((weight * (size - (Z * Y).sum(axis=1))).sum() + ridge)


_OPTIONS: list[dict[str, Any]] = [
    {"strategy": "herta"},  # proven from all rows of Q
    {"strategy": "herta", "sparsify": True, "sketch": True, "ridge": 0.1},
    {"strategy": "herta", "sparsify": "mixed", "tol": 1e-2},
    {"strategy": "herta", "optimizer": "momentum", "fit_intercept": True},
    {"strategy": "herta", "optimizer": "gd", "learning_rate": "spectral", "max_iter": 300},
    {"loss": "ce", "ridge": 0.1, "strategy": "herta", "optimizer": "lbfgs", "fit_intercept": True},
    {"loss": "bce", "ridge": 0.1, "fit_intercept": True},
    {"lam": [0.0, 2.0, 9.0], "fit_intercept": True, "ridge": 0.1},
    {"loss": "ce", "ridge": 0.1, "class_weight": "balanced", "fit_intercept": True},
    {"ridge": 0.1, "class_weight": {2: 3.0}, "sketch": 60, "strategy": "herta"},
    {"label_features": 3, "ridge": 0.1},
]


def check_options_of_parts() -> None:
    """Status, certificate and objective of one process; what is proven holds by dense algebra."""
    _, X, y, train = data(12)
    edges, ids = with_a_hub(), np.arange(N)
    mask = np.isin(ids, train[: N // 3])  # the last ranks of "blocks" have no training node
    whole, weight = Graph.from_edges(edges, N), 0.1 + np.random.default_rng(3).random(N)
    many = np.random.default_rng(4).integers(0, 2, (N, 3))
    for i, params in enumerate(_OPTIONS):
        params = {"lam": 3.0, **params}
        part = parts(edges, None, ["blocks", _SCATTERED, _ALONE][i % 3])
        at, labels = part.nodes, many if params.get("loss") == "bce" else y
        given: dict[str, Any] = {"sample_weight": weight} if i % 2 else {}
        here = {name: value[at] for name, value in given.items()}
        one = HERTA(**params).fit(whole, X, labels, mask, **given)
        model = HERTA(**params).fit(part, X[at], labels[at], mask[at], **here)
        assert model.status_ == one.status_ == "certified", (params, one.status_, model.status_)
        assert model.certificate_.kind == one.certificate_.kind, params
        assert (model.train_ == one.train_).all(), params
        seen = ranks_of(COMM).each((model.W_.tobytes(), model.intercept_.tobytes()))
        assert len(set(seen)) == 1, params
        Z = one.transform(whole, X)
        near = np.abs(model.transform(part, X[at]) - Z[at]).max(initial=0)
        assert near <= 3 * np.sqrt(model.tol) * np.abs(Z).max(), params
        right = (model.predict(part, X[at]) == one.predict(whole, X)[at]).sum()
        assert right >= labels[at].size - 0.02 * labels.size, params
        score = model.score(part, X[at], labels[at])
        assert abs(score - one.score(whole, X, labels)) < 0.02, params
        if "label_features" in params:
            continue
        lams = np.atleast_1d(params["lam"])
        A = np.hstack([dense_rows(edges, X, lam) for lam in lams])[mask]
        Y = many[mask] if params.get("loss") == "bce" else np.eye(3)[y[mask]]
        w = (weight if given else np.ones(N))[mask]
        chosen = params.get("class_weight")
        if chosen is not None:
            share = {c: (y[mask] == c).mean() * 3 for c in range(3)}
            factor = [1 / share[c] if chosen == "balanced" else chosen.get(c, 1.0) for c in y[mask]]
            w = w * np.array(factor)
        found, best = objective(model, A, Y, w), objective(one, A, Y, w)
        assert found <= (1 + model.certificate_.value) * best * (1 + 1e-12), params
        told = model.history_[-1]
        assert abs(told["loss"] - found) <= told["loss_error"] + 1e-10 * found, params


def check_leave_one_out_of_parts() -> None:
    """Against fits that really leave a node out, and the variance by dense algebra."""
    edges, X, y, train = data(6)
    targets, mask = X[:, :2] + y[:, None], np.isin(np.arange(N), train)
    part, beside = parts(edges, None, _SCATTERED), np.arange(N) % 5 == 1
    at = part.nodes
    model = HERTA(lam=3.0, ridge=0.2, fit_intercept=True)
    model.fit(part, X[at], targets[at], mask[at], evaluate=beside[at], loo=True)
    rows = dense_rows(edges, X, 3.0)
    A, Y = rows[mask], targets[mask]
    assert (model.train_ == train).all()
    for i in (0, 17, A.shape[0] - 1):
        left = np.arange(A.shape[0]) != i
        mean, Y_mean = A[left].mean(axis=0), Y[left].mean(axis=0)
        B = A[left] - mean
        W = np.linalg.solve(B.T @ B + 0.2 * np.eye(6), B.T @ (Y[left] - Y_mean))
        assert np.abs(model.loo_[i] - ((A[i] - mean) @ W + Y_mean)).max() < 1e-4
    B = A - A.mean(axis=0)
    inverse = np.linalg.inv(B.T @ B + 0.2 * np.eye(6))
    leverage = np.einsum("ij,jk,ik->i", B, inverse, B) + 1 / A.shape[0]
    assert np.abs(model.leverage_ - leverage).max() < 1e-4
    off = B @ inverse @ B.T @ (Y - Y.mean(axis=0)) - (Y - Y.mean(axis=0))
    noise = (off**2).sum(axis=0) / (A.shape[0] - leverage.sum())
    others = rows[at][beside[at]] - A.mean(axis=0)
    spread = 1 + np.einsum("ij,jk,ik->i", others, inverse, others) + 1 / A.shape[0]
    assert np.abs(model.variance_ - spread[:, None] * noise).max(initial=0) < 1e-3 * noise.max()
    Z = model.transform(part, X[at])[beside[at]]
    assert np.abs(model.outputs_ - Z).max(initial=0) < 1e-3


def check_warm_starts_and_files_of_parts() -> None:
    edges, X, y, train = data(20)
    mask, folder = np.isin(np.arange(N), train), shared_folder()
    before, part = parts(edges[:, :-9], None, _SCATTERED), parts(edges, None, _SCATTERED)
    at = part.nodes
    for params in ({"lam": 3.0, "strategy": "herta"}, {"lam": 3.0, "loss": "ce", "ridge": 0.1}):
        old = HERTA(**params).fit(before, X[at], y[at], mask[at])
        new = HERTA(**params).fit(part, X[at], y[at], mask[at], warm_start=old)
        one = HERTA(**params).fit(Graph.from_edges(edges, N), X, y, mask)
        assert new.status_ == "certified"
        assert np.abs(new.W_ - one.W_).max() < 3e-3 * np.abs(one.W_).max()
    if SIZE == 1:
        return
    Z = new.transform(Graph.from_edges(edges, N), X)
    labels = new.predict(part, X[at], out=folder / "Z.npy")
    assert (labels == new.predict(part, X[at])).all()
    assert np.abs(np.load(folder / "Z.npy") - Z).max() < 1e-4 * np.abs(Z).max()
    some = np.flatnonzero(mask[at])
    mine = new.transform(part, X[at], idx=some, out=folder / "some.npy")
    assert np.abs(mine - Z[at][some]).max(initial=0) < 1e-4 * np.abs(Z).max()
    assert np.load(folder / "some.npy").shape == (int(mask.sum()), 3)
    assert np.abs(new.predict_proba(part, X[at]).sum(axis=1) - 1).max(initial=0) < 1e-5
    assert new.decision_function(part, X[at]).shape == (X[at].shape[0], 3)
    new.save(folder / f"model-{RANK}.npz")
    ranks_of(COMM).arrive()
    assert (HERTA.load(folder / "model-0.npz").W_ == new.W_).all()


def check_components_of_parts() -> None:
    if SIZE == 1:
        return
    rng = np.random.default_rng(8)
    for partition in partitions():
        edges = rng.integers(0, N, (2, N // 3))  # many components, most of them on several ranks
        whole, part = Graph.from_edges(edges, N), parts(edges, None, partition)
        rows = rng.integers(0, N, 9)
        here = np.flatnonzero(np.isin(np.arange(N)[part.nodes], rows))
        assert (part.connected_to(here) == whole.connected_to(rows)[part.nodes]).all()


# ---- checkpoints -----------------------------------------------------------------------------
def check_checkpoints_of_parts() -> None:
    """A fit that was ended in a block of Q, or in a step, goes on to the same bits."""
    edges, X, y, train = data(100)
    mask = np.isin(np.arange(N), train)
    part = parts(edges, None, _SCATTERED)
    at, block = part.nodes, Rows._block

    def fatal(self: Any, J: slice, *rest: Any) -> Any:
        if J.start > 0 and RANK == SIZE - 1:
            raise OSError("the disk is full")
        return block(self, J, *rest)

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 5 and RANK == SIZE // 2:
            raise OSError("the disk is full")

    slow = {"strategy": "herta", "loss": "ce", "ridge": 0.1, "precondition": False, "tol": 1e-3}
    for params in ({"lam": 5.0, "memory_budget": "1GB"}, {"lam": 2.0, "max_iter": 40, **slow}):
        folder, model = shared_folder(), HERTA(**params)
        state = Checkpoint(folder, worth=0.0)
        given = (part, X[at], y[at], mask[at])
        exact = HERTA(**params).fit(*given)
        with patch.object(Rows, "_block", fatal):
            said = raises(OSError, lambda: model.fit(*given, callback=stop, checkpoint=state))  # noqa: B023
        assert "the disk is full" in said
        model.fit(*given, checkpoint=Checkpoint(folder))
        assert (model.W_ == exact.W_).all()
        assert model.certificate_ == exact.certificate_
        assert len(model.history_) == len(exact.history_)
        if "loss" in params:
            _other_ranks(folder, params)
        other = HERTA(**{**params, "lam": 3.0})
        assert "lam" in raises(ValueError, lambda: other.fit(*given, checkpoint=state))  # noqa: B023
        changed = X[at].copy()
        if RANK == 0:
            changed[0, 0] += 1
        here = (part, changed, y[at], mask[at])
        said = raises(ValueError, lambda: model.fit(*here, checkpoint=state))  # noqa: B023
        assert "the features X" in said


def _other_ranks(folder: Path, params: dict[str, Any]) -> None:
    """Other ranks with other rows are refused, and what these have left stays."""
    if SIZE < 3:
        return
    edges, X, y, train = data(100)
    few = COMM.Split(int(RANK == SIZE - 1), RANK)
    if RANK < SIZE - 1:
        share = edges[:, few.rank :: few.size]
        part = Graph.from_edges(share, N, comm=few, split="nodes")
        at, mask = part.nodes, np.isin(np.arange(N), train)
        given = (part, X[at], y[at], mask[at])
        state = Checkpoint(folder)
        said = raises(ValueError, lambda: HERTA(**params).fit(*given, checkpoint=state))
        assert "the graph" in said
    few.Free()
