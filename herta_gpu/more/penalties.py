"""What an edge costs that is stretched: penalties rho(r^2) that grow slower than r^2.

rho'(0) is 1 and rho is concave, so that every edge counts for gamma = rho'(r^2) of its weight, 1
where its ends agree and less the further they are apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from herta_gpu.plumbing.checks import check_not_negative, check_positive


@dataclass(frozen=True)
class Penalty(ABC):
    """rho(r^2) of the distance r between the ends of an edge: r^2 at first, growing slower later.

    Parameters
    ----------
    delta : float, optional
        The distance from which an edge is distrusted.  rho'(0) is 1: for a large delta this is the
        model without attention, and lam keeps its meaning.
    quantile : float
        Without a delta: that of the distances where a model without attention has put its Z.
    """

    delta: Any = None
    quantile: float = field(default=0.3, kw_only=True)

    def __post_init__(self) -> None:
        if self.delta is not None:
            check_positive("delta", self.delta)
        check_positive("quantile", self.quantile)
        if self.quantile > 1:
            raise ValueError(f"quantile must be at most 1, not {self.quantile!r}.")

    def at(self, delta: float) -> Self:
        """The same penalty with this delta."""
        return replace(self, delta=delta)

    @property
    def concavity(self) -> float:
        """kappa: how far the second derivative of r -> rho(r^2) / 2 falls below 0."""
        return 0.0

    @abstractmethod
    def weight(self, r: Any) -> Any:
        """gamma = rho'(r^2), from 0 to 1."""

    @abstractmethod
    def slope(self, r: Any) -> Any:
        """rho''(r^2), never positive."""

    @abstractmethod
    def value(self, r: Any) -> Any:
        """rho(r^2)."""


class PseudoHuber(Penalty):
    """gamma = 1 / sqrt(1 + r^2 / delta^2): smooth, and a convex energy.

    Examples
    --------
    >>> from herta_gpu import PseudoHuber
    >>> float(PseudoHuber(delta=2.0).weight(1.5))
    0.8
    """

    def weight(self, r: Any) -> Any:
        x = np.minimum(r / self.delta, 1e150)  # its square is a number, and hypot takes long
        return 1.0 / np.sqrt(1.0 + x * x)

    def slope(self, r: Any) -> Any:
        return -(self.weight(r) ** 3) / (2 * self.delta**2)

    def value(self, r: Any) -> Any:
        return 2 * r * (r / (1.0 + np.hypot(1.0, r / self.delta)))


@dataclass(frozen=True)
class Power(Penalty):
    """gamma = min(1, (delta / r)^(2 - p)): convex for p >= 1, and for any p if lam is small.

    p goes from 0 (rho grows like a logarithm) to 2 (no attention); 1 is `Huber`.

    Notes
    -----
    The attention of TWIRLS with its tau, p and T = infinity weighs an edge by
    1 / max(tau, s^(1 - p/2)).  That is ``Power(delta=tau ** (1 / (2 - p)), p=p)`` with lam / tau in
    place of lam.  TWIRLS weighs once, half way through its steps, and takes new degrees from the
    weights; here the energy itself is minimised, and degrees stay.
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("p", self.p)
        if self.p > 2:
            raise ValueError(f"p must be at most 2, not {self.p!r}.")

    @property
    def concavity(self) -> float:
        return max(0.0, 1.0 - self.p)

    def weight(self, r: Any) -> Any:
        return (self.delta / np.maximum(r, self.delta)) ** (2 - self.p)

    def slope(self, r: Any) -> Any:
        far = np.maximum(r, self.delta)
        return np.where(r > self.delta, -(1 - self.p / 2) * self.weight(far) / far**2, 0.0)

    def value(self, r: Any) -> Any:
        near, far = np.minimum(r, self.delta), np.log(np.maximum(r, self.delta) / self.delta)
        grown = 2 * far if self.p == 0 else np.expm1(self.p * far) * (2 / self.p)
        return near**2 + self.delta**2 * grown


@dataclass(frozen=True)
class Huber(Power):
    """gamma = min(1, delta / r): `Power` with p = 1, a convex energy with kinks."""

    p: float = field(default=1.0, init=False, repr=False)
