"""Numbers and ids next to the values of the lines: none says another order of items, or that a trace is another one."""

import re
import threading
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.readers.tree import Value
from tracestore.store.vocabulary import SAYING, is_question_id

_ID_COLUMNS = re.compile(
    r"(?i)((question|q|trace|example|row|line|item|sample|prompt|data(set)?|orig(inal)?|global|array|tensor|vector"
    r"|hidden|states?|embedding|activation|doc(ument)?|record|entry|instance|problem|query|request|conversation"
    r"|custom)?_?)?(ids?|qid|u?uid|guid|idx|index|number|no|row)|position|pos|slot|order"
)
Bound = dict[str, Any]  # as in walk
_UNNAMED = ("", "Unnamed: 0")  # the index of a table, of which a program may have left out rows
_IN_ORDER = re.compile(r"\[([^\]]*= ?#[^\]]*)?\]/$")
_INNER = re.compile(r"\[(?:([KLSP])|[^\]]*\bsample ?= ?#[^\]]*)\]/$")
# What a name with {id} means as a whole.
_NAMED = re.compile(r"\{id[:}][^\[]*/$|\{id[:}][^\[]* : $")
_MAX_IDS = 10_000  # that are compared with each other
# What tells parts of one trace apart in an id: the number of a layer, and what is in front of the answer.
_PART_OF_ID = re.compile(r"(.*[^a-z])(?:(layers?[_-]?)\d+|(prompt|question|answer|response))([^a-z].*)?", re.I | re.S)
_PLACES = SAYING["numbers of rows"]
_NUMBERS = _PLACES | {"id", "num", "number", "no"}
_ANSWERS = SAYING["generated"] | {"sample", "attempt", "trial", "rollout", "run", "draw"}
_ANSWER = frozenset(["sample", "attempt", "trial", "rollout", "run", "draw", "generation", "gen", "k"])
# By what counts items: the name that binds their number, the words for such items, those that number them behind such a
# word, and those that number them alone.
_NAMES = {
    "#": ("sample", _ANSWERS, _NUMBERS, _ANSWER),
    "K": ("sample", _ANSWERS, _NUMBERS, _ANSWER | _PLACES),
    "L": ("layer", {"layer", "block"}, _NUMBERS, {"layer", "block"} | _PLACES),
    "S": ("token", {"token", "tok"}, _PLACES, _PLACES),
    "P": ("step", {"step", "pass", "token"}, _NUMBERS, {"step"} | _PLACES),
}


def key_words(key: str) -> list[str]:
    """Return the words of a key in lower case."""
    return re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())


class RowNumbers:
    """Compare the numbers of rows and items with their order (rule 13).

    Parameters
    ----------
    is_stated : bool
        Whether a person states the layout.
    """

    def __init__(self, *, is_stated: bool) -> None:
        self._is_stated = is_stated
        self._lock = threading.Lock()
        self._rows: dict[tuple[Any, ...], int] = {}
        self._items: dict[tuple[Any, ...], tuple[Bound, int, int]] = {}  # what is bound, the place and the number
        self._first: dict[tuple[str, str], int] = {}  # the number of the first answer
        self._parts: dict[tuple[str, str | None], str] = {}  # the first id by what is around the name of a part
        self._of_parts: set[tuple[str, str | None]] = set()  # those with several parts
        self._ids: dict[str, tuple[dict[str, str], dict[str, str]]] = {}  # by path: the ids of names, and the reverse

    def check(self, prefix: str, key: str, value: Value, bound: Bound, *, is_of_states: bool, is_chunk: bool) -> None:
        """Refuse a value that no line names, if it says that items or rows which are taken in order have another one."""
        if "id" in bound and type(value) in (str, int) and _NAMED.search(prefix) and is_question_id(key.lstrip("@")):
            self._check_id(f"{prefix}{key}", str(bound["id"]), str(value).strip())
        inner = _INNER.search(prefix)
        if inner is not None and self._check_item(prefix, key, value, bound, inner[1] or "#"):
            return
        if _IN_ORDER.search(prefix) and not is_of_states:
            self._check_row(f"{prefix}{key}", key, value, bound, is_chunk=is_chunk)

    def check_parts(self, question_id: str, *, is_layer: bool) -> None:
        """Rule 11: ids do not tell the parts of several traces apart [`q0_layer0.npy`, of one layer; `q0_prompt.npy`]."""
        if (match := _PART_OF_ID.fullmatch(question_id)) is None or (match[2] and not is_layer):
            return
        rest = match[1], match[4]
        with self._lock:
            if len(self._parts) < _MAX_IDS:
                self._parts.setdefault(rest, question_id)
            if question_id != self._parts.get(rest, question_id):
                self._of_parts.add(rest)
            is_wrong = len(self._of_parts) > 1
        if is_wrong:
            of_layer = f"{match[2]}{{layer}} behind {{id}} binds the layer"
            way = of_layer if match[2] else "two addresses are prompt and answer"
            raise InvalidInputError(
                f"the ids {escape_unprintable(self._parts[rest], 60)!r} and {escape_unprintable(question_id, 60)!r} differ "
                f'in what names a part of a trace, as others do: {way}; question_id = "={{id}}" if each is a trace',
                field="question_id",
            )

    def _check_id(self, path: str, own: str, other: str) -> None:
        """Rule 11: a trace that is named by a file or key does not hold the id of another one."""
        with self._lock:
            of_names, names = self._ids.setdefault(path, ({}, {}))
            if len(of_names) < _MAX_IDS:
                of_names.setdefault(own, other)
                names.setdefault(other, own)
            pair = (own, other) if other in of_names else (names.get(own, own), own)
        if pair[0] != pair[1]:
            raise InvalidInputError(
                f"{path}: the trace named {escape_unprintable(pair[0], 40)!r} has the id {escape_unprintable(pair[1], 40)!r}, "
                f'which names another one; a line question_id takes it, with {{n}} instead of {{id}} in names, ignore = ["{path}"] if it is none'
            )

    def _check_item(self, prefix: str, key: str, value: Value, bound: Bound, letter: str) -> bool:
        """Return whether a key numbers the items of a list; refuse a number that contradicts their order."""
        name, kinds, behind, alone = _NAMES[letter]
        text, words = str(value), key_words(key)
        is_pair = len(words) == 2 and words[0] in kinds and words[1] in behind
        if not (is_pair or (len(words) == 1 and words[0] in alone)) or isinstance(value, bool) or not text.isdecimal():
            return False
        number, place = int(text), bound["sample" if letter == "#" else letter]
        others = {n: v for n, v in bound.items() if n not in ("sample", letter)}
        # Rows of several questions may lie between each other, items of several lists only in files of other threads.
        group = tuple(others.items()) if letter == "#" else threading.get_ident()
        with self._lock:
            before = self._items.get((prefix, key, group), (None, 0, 0))
            self._items[prefix, key, group] = others, place, number
            step = number - before[2]
            if before[0] != others or step == 0:  # a number of all items
                return True
            is_same = step > 0 if letter == "L" else step == place - before[1]
            if is_same and name == "sample" and words[0] not in _PLACES:  # alike in all traces, from 0 or from 1 on
                is_same = number - place == self._first.setdefault((prefix, key), int(number > place))
        if not is_same:
            raise InvalidInputError(
                f"{prefix}{key}: the item {place} in order has the number {number}; [{name}={key}] in each line of the "
                f'list takes the numbers, ignore = ["{prefix}{key}"] if it numbers no items'
            )
        return True

    def _check_row(self, path: str, key: str, value: Value, bound: Bound, *, is_chunk: bool) -> None:
        """Refuse a column of ids that is left unused; one from 0 to N - 1 is fine."""
        if value is None or not (key in _UNNAMED or _ID_COLUMNS.fullmatch(key)):
            return
        text, is_index = str(value), key in _UNNAMED and str(value).isdecimal()
        # Rows run on over chunks alone.
        file = bound.get("file") if is_chunk or "chunk" not in bound else None
        rows = (path, file, *map(bound.get, AXIS_NAMES))
        with self._lock:
            # Chunks of states are read in any order, or alone: each begins with the same number in all of its layers.
            first = int(text) if is_chunk and text.isdecimal() else 0
            if rows not in self._rows and is_chunk:
                self._rows[rows] = self._rows.setdefault((path, bound["chunk"]), first)
            expected = self._rows.get(rows, 0)
            self._rows[rows] = (int(text) if is_index else expected) + 1
        if is_index and int(text) < expected:
            raise InvalidInputError(
                f'{path}: the row {text} is behind {expected - 1}: rows in another order? ignore = ["{path}"] if not'
            )
        if (key not in _UNNAMED or not self._is_stated) and text != str(expected):
            name = path.rpartition("[]/")[0]
            raise InvalidInputError(
                f"{path}: rows are joined in order, and this column of ids is left out; {name}[id={key}] in each line of "
                f"the table joins by it, [N={key}] by the place of the states, a line question_id takes it, "
                f'ignore = ["{path}"] if it numbers no rows'
            )
