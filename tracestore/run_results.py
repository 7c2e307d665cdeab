"""results.json of a training run: one reader, which checks all that other commands use of it.

The file may be damaged, edited or written by another program. What is read here can be used without further checks.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.fsio import read_json

RESULTS_FILE = "results.json"
# A check raises ValueError, which begins with the place of the value in the document.
Check = Callable[[Any, str], None]


def read_results(folder: Path, *, is_finished: bool = False) -> dict[str, Any]:
    """Read the results of a training run.

    Parameters
    ----------
    folder : Path
        Output folder of ``tracestore train``.
    is_finished : bool
        Refuse the results of a run that was interrupted.

    Raises
    ------
    UsageError
        The file cannot be read, or does not hold such results. The message names the first wrong value.
    """
    path = folder / RESULTS_FILE
    try:
        results: dict[str, Any] = read_json(path)
        _check_results(results, "results")
        if is_finished and "comparisons" not in results:
            raise ValueError("found no comparisons, which a run writes at its end")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        what = "a finished run" if is_finished else "a run"
        reason = escape_unprintable(str(error), 200)
        raise UsageError(f"{path}: not the results of {what} of tracestore train: {reason}") from None
    return results


def _value(expected: str, accepts: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> None:
        if not accepts(value):
            raise ValueError(f"{where}: found {value!r:.40}, expected {expected}")

    return check


def _is_number(value: Any) -> bool:
    # A comparison accepts integers of every size, which math.isfinite does not.
    return type(value) in (int, float) and abs(value) < math.inf and abs(value) < 1 << 1000


def _integer(limit: int) -> Check:
    return _value(f"a whole number from 0 and below {limit:,}", lambda value: type(value) is int and 0 <= value < limit)


def _optional(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _array(expected: str, *types: type) -> Check:
    """Check a list by the types of its items, without a call for each."""
    return _value(f"a list of {expected}", lambda value: isinstance(value, list) and set(map(type, value)) <= {*types})


def _items(check: Check) -> Check:
    def check_items(value: Any, where: str) -> None:
        _value("a list", lambda v: isinstance(v, list))(value, where)
        for k, item in enumerate(value):
            check(item, f"{where}[{k}]")

    return check_items


def _object(fields: Mapping[str, Check] | None = None, *, each: Check | None = None) -> Check:
    """Check an object with these fields, of which those whose names end with ? may be missing, or all its values."""

    def check(value: Any, where: str) -> None:
        _value("an object", lambda v: isinstance(v, dict))(value, where)
        for name, check_field in (fields or {}).items():
            key = name.removesuffix("?")
            if key in value:
                check_field(value[key], f"{where}.{key}")
            elif key == name:
                raise ValueError(f"{where}: found no {key}")
        for key, item in value.items() if each is not None else ():
            each(item, f"{where}.{key}")  # type: ignore[misc]

    return check


def _check_scores(scores: Any, where: str) -> None:
    """Check the test scores of a model: equally many values in each list, and both classes."""
    _object({"trace_index": _array("numbers", int), "question_id": _array("texts", str), "group": _array("texts", str),
             "label": _array("0 and 1", int), "logit": _array("numbers", int, float)})(scores, where)  # fmt: skip
    lengths = {len(scores[name]) for name in ("trace_index", "question_id", "group", "label", "logit")}
    if len(lengths) != 1:
        raise ValueError(f"{where}: found lists of different lengths")
    if {*scores["label"]} != {0, 1}:
        raise ValueError(f"{where}.label: expected 0 and 1, and both of them")
    if not all(0 <= index < 1 << 53 for index in (min(scores["trace_index"]), max(scores["trace_index"]))):
        raise ValueError(f"{where}.trace_index: found a value below 0 or above 2^53")
    try:
        is_finite = bool(np.isfinite(np.array(scores["logit"], float)).all())
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"{where}.logit: found a value that is not finite")


def _check_provenance(value: Any, where: str) -> None:
    try:
        Provenance.from_json(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


_number, _text = _value("a finite number", _is_number), _value("a text", lambda value: isinstance(value, str))
_positive = _value("a number above 0", lambda value: _is_number(value) and value > 0)
_curve = _value(
    "a list of numbers or null",
    # NaN is a number of a curve. Infinity and integers that are no float are not.
    lambda v: (
        isinstance(v, list) and all(n is None or (type(n) in (int, float) and not abs(n) >= 1 << 1000) for n in v)
    ),
)
_test = {"test": _object(), "threshold?": _number, "temperature?": _positive, "test_scores?": _check_scores}
_probe = _test | {"best_val_auroc?": _optional(_number)}
_model = _test | {"history": _object(dict.fromkeys(("train_loss", "val_loss", "val_auroc"), _curve), each=_curve)}
# What one training has, and the mean over several has not.
_tested = {"threshold": _number, "temperature": _positive, "test_scores": _check_scores}
_fold, _seed = _optional(_integer(1 << 31)), _integer(1 << 32)


def _check_results(results: Any, where: str) -> None:
    # Without runs, or probes, the entries of the document itself have the scores.
    of_run, of_probe = ({} if isinstance(results, dict) and results.get(key) else _tested for key in ("runs", "probes"))
    _object({
        "models": _object(each=_object(_model | of_run)),
        "config": _object({"seed": _seed}),
        "store": _object({"path": _text, "provenance": _items(_check_provenance)}),
        "runs?": _items(_object({"fold": _fold, "seed": _seed, "models": _object(each=_object(_model | _tested))})),
        "probe?": _object(_probe | of_probe),
        "probes?": _items(_object({"fold": _fold} | _probe | _tested)),
        "comparisons?": _items(_object()),
        "traces": _text,
        "answers": _optional(_text),
    })(results, where)  # fmt: skip
    names = {name for run in results.get("runs", ()) for name in run["models"]}
    if "comparisons" in results and not names <= results["models"].keys():
        raise ValueError(f"{where}.models: found no entry of {min(names - results['models'].keys())}")
