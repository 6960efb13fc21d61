"""One object that holds graph, features, labels and masks: a `Data` of PyG's, or our `Dataset`.

Neither PyTorch nor PyG is imported: an object is recognised by what it offers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import scipy.sparse as sp

from herta_gpu.graph import Graph, check_graph
from herta_gpu.plumbing.interop import plain

Method = TypeVar("Method", bound=Callable[..., Any])


class Bundle(NamedTuple):
    """What a model is fitted and scored with; `train` and `test` are ids, masks or None."""

    graph: Graph
    X: Any
    y: Any
    train: Any
    test: Any


def unpack(
    data: Any, X: Any = None, y: Any = None, train: bool = True, test: bool = True
) -> Bundle:
    """The bundle of an object that holds all of it; an X or y beside it goes first.

    Masks that nobody asks for are not looked at.
    """
    if all(hasattr(data, name) for name in ("graph", "X", "y", "split")):
        found = Bundle(data.graph, data.X, data.y, *map(data.split.get, ("train", "test")))
    else:
        if hasattr(data, "to_homogeneous"):
            raise TypeError("Nodes of several types are not one graph: use data.to_homogeneous().")
        if hasattr(data, "__getitem__") and hasattr(data, "get") and hasattr(data, "len"):
            raise TypeError("This is a data set of PyG's: give one of its graphs, dataset[0].")
        if getattr(data, "edge_index", None) is None and getattr(data, "adj_t", None) is None:
            check_graph(data)
        masks = [
            _mask_of(data, name) if asked else None
            for name, asked in (("train_mask", train), ("test_mask", test))
        ]
        y = column_of(getattr(data, "y", None)) if y is None else y
        found = Bundle(pyg_graph(data), features_of(data), y, *masks)
    X, y = (found.X if X is None else X), (found.y if y is None else y)
    if X is None:
        raise ValueError("The data hold a graph but no features: give X beside them.")
    return found._replace(X=X, y=y)


def takes_bundles(rows: str | None = None) -> Callable[[Method], Method]:
    """Let a method (graph, X, ...) be called with one object that holds all of it.

    `rows` names what its ids or masks are for: "train" for a fit, "idx" for a score on the test
    nodes.  Arguments that are given beside the object go first.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)

        @wraps(method)
        def wrapped(self: Any, graph: Any, X: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(graph, Graph):
                return method(self, graph, X, *args, **kwargs)
            given = signature.bind(self, graph, X, *args, **kwargs).arguments
            train = rows == "train" and given.get("train") is None
            test = rows == "idx" and given.get("idx") is None
            bundle = unpack(graph, X, given.get("y"), train, test)
            given |= {"graph": bundle.graph, "X": bundle.X}
            if "y" in signature.parameters:
                given["y"] = bundle.y
            if train or test:
                given[str(rows)] = bundle.train if train else bundle.test
            return method(**given)

        return cast(Method, wrapped)

    return decorate


def pyg_graph(data: Any) -> Graph:
    """The graph of a PyG `Data`: of edge_index, or of a sparse adj_t.

    Weights are edge_weight, the values of adj_t, or an edge_attr of one real number per edge; more
    numbers per edge, or whole ones, which may be types of edges, are none.
    """
    if getattr(data, "edge_index", None) is None:
        A = sp.coo_array(plain(data.adj_t))
        edges, weight = np.stack([A.row, A.col]), A.data
    else:
        edges, weight = on_host(data.edge_index), column_of(getattr(data, "edge_weight", None))
        given = column_of(getattr(data, "edge_attr", None)) if weight is None else None
        if given is not None and given.ndim == 1 and given.dtype.kind == "f":
            weight = given
    weighted = weight is not None and bool((weight != 1).any())
    return Graph.from_edges(edges, int(data.num_nodes), weight if weighted else None)


def features_of(data: Any) -> Any:
    """x as it is, tensors detached; a sparse one as a SciPy matrix."""
    x = plain(getattr(data, "x", None))
    return x.float() if str(getattr(x, "dtype", "")) == "torch.float16" else x


def column_of(given: Any) -> Any:
    """An array on the host, or None; one column, as OGB has it, is one number per node."""
    if given is None:
        return None
    given = on_host(given)
    return given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given


def _mask_of(data: Any, name: str) -> Any:
    mask = column_of(getattr(data, name, None))
    if mask is not None and mask.ndim != 1:
        other = f", or by train=data.{name}[:, 0]." if name == "train_mask" else "."
        raise ValueError(
            f"{name} has {mask.shape[1]} columns, one for each split: choose one of them, as by "
            f"data.{name} = data.{name}[:, 0]{other}"
        )
    return mask


def on_host(array: Any) -> Any:
    """A tensor of PyTorch's on any device, or anything that NumPy understands, for NumPy."""
    array = plain(array)
    return np.asarray(array.cpu() if hasattr(array, "detach") else array)
