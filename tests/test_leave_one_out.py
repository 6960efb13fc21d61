"""Leave-one-out in closed form against models that were really fitted without each row."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from tests.conftest import dense_H, random_graph

N = 90
GRAPH = random_graph(N, 260)
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, 40)) + 1.0
Y = RNG.standard_normal((N, 2))
W = RNG.uniform(0.2, 3.0, N)
BOTH = list(itertools.product([False, True], repeat=2))
TIGHT = {"tol": 1e-12, "dtype": "float64", "strategy": "direct"}


def fitted(A, Y, w, ridge, intercept):
    """(weights, constants) by augmented least squares in NumPy.

    Without a ridge the weights are the smallest of the best ones; constants may be of any size.
    """
    if ridge == 0:
        mean, level = (w @ A / w.sum(), w @ Y / w.sum()) if intercept else (0.0, np.zeros(1))
        root = np.sqrt(w)[:, None]
        found = np.linalg.lstsq(root * (A - mean), root * (Y - level), rcond=1e-9)[0]
        return found, level - (mean @ found if intercept else 0.0)
    ones = np.ones((A.shape[0], int(intercept)))
    B = np.sqrt(w)[:, None] * np.hstack([A, ones])
    penalty = np.sqrt(ridge) * np.eye(A.shape[1], B.shape[1])
    stacked = np.vstack([B, penalty])
    wanted = np.vstack([np.sqrt(w)[:, None] * Y, np.zeros((len(stacked) - len(B), Y.shape[1]))])
    found = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    return found[: A.shape[1]], found[A.shape[1] :].sum(axis=0)


@pytest.mark.parametrize(
    ("few", "ridge"), [(False, 0.0), (False, 0.5), (True, 0.5), (True, 1e-4), (True, 0.0)]
)
@pytest.mark.parametrize(
    ("intercept", "weighted"), list(itertools.product([False, True], repeat=2))
)
def test_it_is_what_refits_say(few, ridge, intercept, weighted):
    lam, d = ([0, 3.0], 40) if few else (3.0, 12)  # 80 features or 12, of 60 rows
    train, w = np.arange(5, 65), W if weighted else np.ones(N)
    model = HERTA(lam=lam, ridge=ridge, fit_intercept=intercept, **TIGHT)
    more = {"sample_weight": w if weighted else None, "loo": True, "evaluate": [70, 3]}
    model.fit(GRAPH, X[:, :d], Y, train, **more)
    lams = lam if few else [lam]
    Z = np.hstack([np.linalg.solve(dense_H(GRAPH, one), X[:, :d]) for one in lams])
    if ridge == 0:  # `lstsq` then gives the smallest weights of columns of norm 1
        Z = Z / np.tile(np.linalg.norm(X[:, :d], axis=0), len(lams))
    A = Z[train]
    scale = np.abs(Y).max()
    for i, node in enumerate(train):
        others = np.delete(np.arange(len(train)), i)
        V, b = fitted(A[others], Y[train][others], w[train][others], ridge, intercept)
        np.testing.assert_allclose(model.loo_[i], A[i] @ V + b, atol=1e-9 * scale)
        assert model.train_[i] == node
    V, b = fitted(A, Y[train], w[train], ridge, intercept)
    np.testing.assert_allclose(model.outputs_, Z[[70, 3]] @ V + b, atol=1e-8 * scale)
    shifted = Y[train].copy()
    shifted[7] += 1.0  # the leverage is the slope of an output with respect to its own target
    V2, b2 = fitted(A, shifted, w[train], ridge, intercept)
    slope = (A[7] @ V2 + b2 - A[7] @ V - b)[0]
    assert model.leverage_[7] == pytest.approx(slope, abs=1e-9)


def test_one_lam_and_fewer_rows_than_features():
    train, ridge = np.arange(30), 0.2
    model = HERTA(lam=2.0, ridge=ridge, fit_intercept=True, **TIGHT)
    model.fit(GRAPH, X, Y, train, loo=True)
    A = np.linalg.solve(dense_H(GRAPH, 2.0), X)[train]
    for i in (0, 11, 29):
        others = np.delete(train, i)
        V, b = fitted(A[others], Y[others], np.ones(29), ridge, True)
        np.testing.assert_allclose(model.loo_[i], A[i] @ V + b, atol=1e-9)


@pytest.mark.parametrize("lam", [2.0, [0, 2.0]])
@pytest.mark.parametrize(
    ("intercept", "weighted"), list(itertools.product([False, True], repeat=2))
)
def test_no_ridge_and_rows_some_of_which_determine_each_other(lam, intercept, weighted):
    """Without edges equal features make equal rows: 9 nodes are copies, 20 are not."""
    graph = Graph.from_edges(np.zeros((2, 0), dtype=int), num_nodes=N)
    features, train = X.copy(), np.arange(29)
    features[20:23], features[23:29] = features[:3], features[3]
    w = W if weighted else np.ones(N)
    model = HERTA(lam=lam, fit_intercept=intercept, **TIGHT)
    model.fit(graph, features, Y, train, sample_weight=w, loo=True, evaluate=[50])
    blocks = 1 if lam == 2.0 else 2
    A = np.hstack([features / np.linalg.norm(features, axis=0)] * blocks)[train]
    for i in train:
        others = np.delete(train, i)
        V, b = fitted(A[others], Y[others], w[others], 0.0, intercept)
        np.testing.assert_allclose(model.loo_[i], A[i] @ V + b, atol=1e-8)
    assert np.isinf(model.variance_).all()
    assert (model.leverage_[4:20] == 1.0).all()
    assert (model.leverage_[:4] < 0.99).all()


def test_the_variance_of_other_nodes():
    train, beside, ridge = np.arange(60), np.array([80, 61, 70]), 0.3
    model = HERTA(lam=2.0, ridge=ridge, fit_intercept=True, **TIGHT)
    model.fit(GRAPH, X[:, :9], Y, train, evaluate=beside, sample_weight=W, loo=True)
    Z = np.linalg.solve(dense_H(GRAPH, 2.0), X[:, :9])
    B = np.hstack([Z, np.ones((N, 1))])
    P = (B[train].T * W[train]) @ B[train] + ridge * np.diag([1.0] * 9 + [0.0])
    e = Y[train] - B[train] @ np.linalg.solve(P, (B[train].T * W[train]) @ Y[train])
    h = W[train] * np.einsum("ij,ij->i", B[train], np.linalg.solve(P, B[train].T).T)
    noise = (W[train, None] * e**2).sum(axis=0) / (60 - h.sum())
    spread = np.einsum("ij,ij->i", B[beside], np.linalg.solve(P, B[beside].T).T)
    np.testing.assert_allclose(model.variance_, (1 + spread)[:, None] * noise, rtol=1e-8)
    np.testing.assert_allclose(model.leverage_, h, atol=1e-9)


def test_a_row_that_alone_decides_a_weight_has_no_model_without_it():
    one = X[:, :4].copy()
    one[:, 3] = 0.0
    one[3, 3] = 1.0
    model = HERTA(lam=[0], **TIGHT).fit(GRAPH, one, Y, np.arange(50), loo=True)
    assert np.isnan(model.loo_[3]).all()
    assert np.isfinite(np.delete(model.loo_, 3, axis=0)).all()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"loss": "ce", "ridge": 0.1}, 'loss="mse" only'),
        ({"strategy": "herta"}, "needs stored rows"),
        ({"sketch": True}, "needs stored rows"),
    ],
)
def test_what_has_none_says_so(params, words):
    y = RNG.integers(0, 3, N)
    with pytest.raises(ValueError, match=words):
        HERTA(**params).fit(GRAPH, X, y, np.arange(20), loo=True)


def test_it_is_there_only_if_it_was_asked_for():
    model = HERTA(ridge=0.1).fit(GRAPH, X, Y, np.arange(60), loo=True)
    assert model.loo_.shape == (60, 2)
    model.fit(GRAPH, X, Y, np.arange(60))
    with pytest.raises(AttributeError, match="loo=True"):
        _ = model.loo_
    with pytest.raises(ValueError, match="loo must be"):
        model.fit(GRAPH, X, Y, np.arange(60), loo="plus")
    assert not hasattr(model, "leverage_")


# ---- unequal units, against refits in exact arithmetic -----------------------------------------
def exact(values):
    """Floats of any width as fractions."""
    return np.vectorize(lambda x: Fraction(*x.as_integer_ratio()), otypes=[object])(values)


def solved(G, B):
    """G^-1 B in fractions, by elimination with pivots."""
    M, n = np.concatenate([G, B], axis=1), G.shape[0]
    for k in range(n):
        i = k + int(np.argmax([M[j, k] != 0 for j in range(k, n)]))
        M[[k, i]] = M[[i, k]]
        M[k] = M[k] / M[k, k]
        for j in range(n):
            if j != k and M[j, k] != 0:
                M[j] = M[j] - M[j, k] * M[k]
    return M[:, n:]


def diffused(graph, lam, X):
    """H^-1 X by elimination in longdouble."""
    M = np.concatenate([dense_H(graph, lam), X], axis=1).astype(np.longdouble)
    n = graph.num_nodes
    for k in range(n):
        M[k] /= M[k, k]
        rest = np.arange(n) != k
        M[rest] -= np.outer(M[rest, k], M[k])
    return M[:, n:]


def exact_fit(A, Y, w, ridge, intercept, others):
    """Outputs of the rows `others` after ridge regression on A, through A A^T in fractions."""
    n = A.shape[0]
    G = A.dot(A.T) + np.diag(ridge / w)
    if intercept:
        one = np.full((n, 1), Fraction(1))
        G = np.block([[G, one], [one.T, np.full((1, 1), Fraction(0))]])
        Y = np.concatenate([Y, np.full((1, Y.shape[1]), Fraction(0))])
    found = solved(G, Y)
    F = others.dot(A.T).dot(found[:n])
    return F + found[n] if intercept else F


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e6, 1e8, 1e9, 1e12])
@pytest.mark.parametrize("lam", [2.0, [0.5, 4.0]])
@pytest.mark.parametrize(("intercept", "weighted"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ridge", [1.0, 1e-3])
def test_a_column_in_another_unit(unit, lam, intercept, weighted, ridge):
    graph, rng, n, d, count = random_graph(24, 50), np.random.default_rng(3), 24, 12, 8
    features, Y = rng.standard_normal((n, d)), rng.standard_normal((n, 2))
    features[:, 4] *= unit
    train, w = np.arange(count), rng.uniform(0.2, 3.0, n) if weighted else np.ones(n)
    model = HERTA(lam=lam, ridge=ridge, fit_intercept=intercept, **TIGHT)
    model.fit(graph, features, Y, train, sample_weight=w, loo=True, evaluate=[15, 20])
    lams = lam if isinstance(lam, list) else [lam]
    A = exact(np.concatenate([diffused(graph, one, features) for one in lams], axis=1))
    T, w, penalty, beside = exact(Y), exact(w), Fraction(ridge), A[[15, 20]]
    H = exact_fit(A[train], np.diag([Fraction(1)] * count), w[train], penalty, intercept, A[train])
    F = exact_fit(A[train], T[train], w[train], penalty, intercept, A[train])
    free = np.array([1 - h for h in np.diag(H)])
    np.testing.assert_allclose(model.leverage_, 1 - free.astype(float), atol=1e-9)
    for i in train:
        rest = np.delete(train, i)
        out = exact_fit(A[rest], T[rest], w[rest], penalty, intercept, A[[i]])[0]
        np.testing.assert_allclose(model.loo_[i], out.astype(float), atol=1e-7 * np.abs(Y).max())
    noise = (w[train, None] * (T[train] - F) ** 2).sum(axis=0) / max(free.sum(), 1)
    # An added row of weight 1 has the leverage s / (1 + s), s its spread.
    spread = []
    for a in beside:
        more, heavier = np.concatenate([A[train], a[None]]), np.append(w[train], Fraction(1))
        unit_target = np.full((count + 1, 1), Fraction(0))
        unit_target[-1] = Fraction(1)
        h = exact_fit(more, unit_target, heavier, penalty, intercept, a[None])[0, 0]
        spread.append(h / (1 - h))
    wanted = (np.array(spread)[:, None] + 1) * noise
    np.testing.assert_allclose(model.variance_, wanted.astype(float), rtol=1e-6)
