"""Limits how much is done at once: less after the device was full, more again after a while."""

from __future__ import annotations


class Limit:
    """Limits tokens or rows; deterministic, so that a run that is repeated splits in the same places.

    >>> limit = Limit(None, grow_after=2)
    >>> limit.failed(1000), limit.parts(1000, units=8)
    (None, 2)
    >>> limit.step_ended(), limit.step_ended(), limit.most  # two clean steps: nothing larger than 1000 was asked for
    (None, None, None)

    Args:
        most: What may be done at once; None for everything.
        grow_after: Optimizer steps without a failure after which ``most`` is doubled. When it then fails again, twice
            as many are needed the next time.
    """

    def __init__(self, most: int | None, grow_after: int) -> None:
        self.most = most
        self._patience = grow_after
        self._clean = 0
        self._grown = False
        self._fitted = 0
        self._wanted = 0

    def tighten(self, most: int | None) -> None:
        """Allow no more than that."""
        if most is not None:
            self.most = most if self.most is None else min(self.most, most)

    def exceeded_by(self, amount: int) -> bool:
        """Whether this amount is too much at once."""
        return self.most is not None and amount > self.most

    def parts(self, amount: int, units: int) -> int:
        """Count the parts into which to cut something beforehand that can be cut into ``units`` at most."""
        if self.most is None or amount <= self.most:
            return 1
        self._wanted = max(self._wanted, amount)
        return max(1, min(units, -(-amount // self.most)))

    def fitted(self, amount: int) -> None:
        """Note that so much went through at once."""
        self._fitted = max(self._fitted, amount)

    def failed(self, amount: int) -> None:
        """Note that so much was too much: half of it is allowed, or what went through before."""
        if self._fitted >= amount:
            self._fitted = 0  # the device has less to give than it had
        self.most = max(-(-amount // 2), self._fitted) if amount > 1 else 1
        self._wanted = max(self._wanted, amount)
        self._clean = 0
        if self._grown:
            self._patience *= 2
            self._grown = False

    def step_ended(self) -> None:
        """Count an optimizer step that is done."""
        if self.most is None:
            return
        self._clean += 1
        if self._clean < self._patience:
            return
        self._clean, self._grown = 0, True
        self.most = self.most * 2 if self.most * 2 < self._wanted else None
