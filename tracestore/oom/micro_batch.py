"""How large a micro-batch is: what was seen to fit, what was seen to fail, and what to try."""

from typing import Any

GROW_AFTER_STEPS = 50
_GROW_AFTER_AT_MOST = 10_000


class MicroBatchPolicy:
    """The size of micro-batches, in items; None is the whole batch.

    Within an epoch a size that fails is halved and, after a while without failures,
    doubled again, ever more rarely. Between epochs it is planned from what was learned:
    halfway between the largest size that worked and the smallest that failed, until
    these are neighbours. A pure function of the events, so that ranks agree and a
    resumed run goes on alike.

    planned: where to begin, from a cost model (measure.budget_plan).
    """

    def __init__(self, planned: int | None = None) -> None:
        self.size = planned
        self.fits: int | None = None  # the largest number of items that went through
        self.fails: int | None = None  # the smallest that failed twice
        self._undecided = False
        self._epoch = 0
        self._good_steps = 0
        self._grow_after = GROW_AFTER_STEPS
        self._largest = 0

    def failed(self, size: int) -> int:
        """A size failed after memory had been cleaned. -> the next size to try."""
        self.fails = size if self.fails is None else min(self.fails, size)
        if self.fits is not None and self.fits >= self.fails:
            self.fits = None
        self._good_steps, self._undecided = 0, True
        self.size = max(1, size // 2)
        return self.size

    def worked(self, micro: int, whole: int) -> None:
        """A step over `whole` items in micro-batches of `micro` went through."""
        # The last batch of an epoch is short and says nothing of what fits.
        self._largest = max(self._largest, whole)
        self.fits = micro if self.fits is None else max(self.fits, micro)
        if self.fails is not None and self.fails <= self.fits:
            self.fails = None
        if self.size is None:
            return
        self._good_steps += 1
        if self._good_steps >= self._grow_after:
            # Each try costs a failed step at worst, so they become rarer.
            self._grow_after = min(_GROW_AFTER_AT_MOST, 2 * self._grow_after)
            self._grow(2 * self.size)

    def _grow(self, size: int) -> None:
        self._good_steps = 0
        self.size = None if size >= self._largest else size

    def begin_epoch(self, epoch: int) -> None:
        """Plans the size of an epoch; again for the same one: nothing changes."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self._undecided and self.fails is not None and self.size is not None:
            fits = self.fits or self.size
            self.size = max(1, fits, (fits + self.fails) // 2)
            self._undecided = self.fails - fits > 2
            self._good_steps = 0
        else:
            self._undecided = False

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, state[name.lstrip("_")])
