"""The size of micro-batches, learned from failures and successes."""

from typing import Any

GROW_AFTER_STEPS = 50
_MAX_GROW_AFTER_STEPS = 10_000


class MicroBatchPolicy:
    """The size of micro-batches in items. None is the whole batch.

    Within an epoch a size that fails is halved and doubled again after a number of steps without
    failures, which doubles each time. Between epochs the size is planned: halfway between the
    largest size that worked and the smallest that failed, until these are neighbors. The sizes are
    a pure function of the outcomes, so that all ranks use the same ones and a resumed run
    continues with them.

    Parameters
    ----------
    planned : int, optional
        The first size.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.size = planned
        self.fits: int | None = None  # the largest number of items that worked
        self.fails: int | None = None  # the smallest that failed
        self._undecided = False
        self._epoch = 0
        self._good_steps = 0
        self._grow_after = GROW_AFTER_STEPS
        self._largest = 0

    def on_failure(self, size: int) -> int:
        """Return the next size to try, after `size` failed."""
        self.fails = size if self.fails is None else min(self.fails, size)
        if self.fits is not None and self.fits >= self.fails:
            self.fits = None
        self._good_steps, self._undecided = 0, True
        self.size = max(1, size // 2)
        return self.size

    def on_success(self, micro_batch: int, batch: int) -> None:
        """Note a step that worked, of a batch of `batch` items in micro-batches of `micro_batch`."""
        # The last batch of an epoch is short: it does not show that a size fits.
        self._largest = max(self._largest, batch)
        self.fits = micro_batch if self.fits is None else max(self.fits, micro_batch)
        if self.fails is not None and self.fails <= self.fits:
            self.fails = None
        if self.size is None:
            return
        self._good_steps += 1
        if self._good_steps >= self._grow_after:
            # Growing may cost a failed step, so it becomes rarer.
            self._grow_after = min(_MAX_GROW_AFTER_STEPS, 2 * self._grow_after)
            self._good_steps = 0
            self.size = None if 2 * self.size >= self._largest else 2 * self.size

    def begin_epoch(self, epoch: int) -> None:
        """Plan the size of an epoch. A second call for the same epoch changes nothing."""
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
        """Return the state as plain values."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; raise ValueError for anything else."""
        for name, default in vars(MicroBatchPolicy()).items():
            value = state[name.lstrip("_")]
            is_size = default is None
            if type(value) is not type(default) and not (is_size and type(value) is int):
                raise ValueError(f"{name}: found {value!r:.40}")
            if value is not None and value < int(is_size):
                raise ValueError(f"{name}: found {value!r:.40}, expected at least {int(is_size)}")
            setattr(self, name, value)
