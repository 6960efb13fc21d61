"""Hidden layers, row norms, hops and the kernel model on the device: what the CPU gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, KernelModel, RandomFeatures
from tests.conftest import problem

pytestmark = [pytest.mark.gpu, pytest.mark.once]
KINDS: dict[str, dict[str, Any]] = {
    "after": {"hidden": 20, "hidden_rank": 4, "hidden_draws": 2},
    "before": {"hidden": 20, "hidden_rank": 4, "hidden_at": "before"},
    "all": {"hidden": 9, "hidden_rank": None, "row_norm": True, "hops": [0, 2], "lam": [3.0]},
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_made(kind: str, sparse: bool, backend: Any) -> None:
    g, X, y, train = problem(n=80)
    X, found = sp.csr_array(X) if sparse else X, []
    for device in ("cpu", "cuda"):
        model = HERTA(ridge=0.5, device=device, normalize="unit", **KINDS[kind])
        model.fit(g, X, y, train, evaluate=[3, 9])
        assert model.status_ == "certified"
        found.append([model.transform(g, X), model.outputs_])
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(there, here, atol=1e-4)


def test_features_on_the_device(backend: Any) -> None:
    g, X, y, train = problem(n=80)
    there = backend.asarray(X)
    for how in ("unit", "standard"):
        params = {"ridge": 0.5, "hidden": 10, "hidden_rank": 3, "normalize": how, "device": "cuda"}
        here, device = HERTA(**params).fit(g, X, y, train), HERTA(**params).fit(g, there, y, train)
        Z = device.transform(g, there)
        assert not isinstance(Z, np.ndarray)
        np.testing.assert_allclose(backend.to_numpy(Z), here.transform(g, X), atol=1e-4)
    made = RandomFeatures(10, 3).fit(there)
    U = made.transform(there)
    assert not isinstance(U, np.ndarray)
    np.testing.assert_allclose(
        backend.to_numpy(U), RandomFeatures(10, 3).fit(X).transform(X), atol=1e-9
    )


def test_the_kernel_model(backend: Any) -> None:
    g, X, y, train = problem(n=80)
    for params in ({"rank": 4}, {"hops": [1], "lam": [2.0], "rank": None}):
        here, there = (KernelModel(device=d, **params).fit(g, X, y, train) for d in ("cpu", "cuda"))
        assert there.status_ == "certified"
        np.testing.assert_allclose(there.transform(g, X), here.transform(g, X), atol=1e-7)
