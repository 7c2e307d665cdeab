"""Places of leaves as addresses: how items and names identify traces, and how tables are joined."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.leaves import ITEMS, Leaf, Observation, Path_, without_names
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import Meaning, Rows, order_of
from tracestore.ingest.propose.names import unknown_words, words_of
from tracestore.store.vocabulary import SAYING

Prefix = tuple[str, Path_]
_ANSWER = re.compile(r"((?:sample|response|generation|answer|gen)[_\-.=]?)\d+", re.IGNORECASE)
_COLUMNS = frozenset(("question_id", "question", "generated_answer", "S.lengths", "S.offsets", "verdict"))
_BOUND_BY_ROWS = ("layer", "token", "step", "dim")


@dataclass
class Identity:
    """A way to tell traces apart.

    Attributes
    ----------
    mode : str
        "ids": items, keys or names say the id; "stack": an axis N; "rows": items by position.
    items : dict
        What stands for the items of a prefix, such as ``[id=qid]``.
    names : dict
        New names of what files and keys bind, by prefix.
    id_leaf : Leaf or None
        The leaf of a line question_id.
    doubts : list of str
        Why the ids are not proved.
    """

    mode: str
    items: dict[Prefix, str] = field(default_factory=dict)
    names: dict[Prefix, dict[str, str]] = field(default_factory=dict)
    id_leaf: Leaf | None = None
    doubts: list[str] = field(default_factory=list)
    ids: frozenset[str] = frozenset()
    letters: str = "LS"


class Places:
    """The leaves of an observation by their records, and the identities that they allow."""

    def __init__(self, observation: Observation, meanings: list[Meaning]) -> None:
        self.observation, self.meanings = observation, meanings
        self.rows = Rows(observation, meanings)

    # Identities

    def identities(self, states: Leaf) -> Iterator[Identity]:
        """Yield the ways in which the traces of states may be told apart."""
        names = self._names(states)
        records = [states.path[: k + 1] for k in states.items_at]
        outer = [key for key, bound in names.items() if "id" in bound]
        identity = Identity("ids", names=self._renamed(states, names, None))
        identity.doubts += [
            family.doubt for family in map(self.observation.families.get, names) if family and family.doubt
        ]
        at = self._add_items(states, identity, records, outer)
        if at is not None:
            yield identity
            if at == 0 and len(records) == 1 and self._in_order(states):
                leaf = self.rows.of(states.files, records[0])["question_id"].leaf
                yield Identity("rows", {(states.files, records[0]): "[]"}, identity.names, leaf, identity.doubts)
            return
        own = self._own_id(states)
        if own is not None:
            ids = frozenset(texts_of(own.scalars))
            yield Identity(
                "ids", dict(identity.items), identity.names, own, [*identity.doubts, *self.rows.doubts_of_key(own)], ids
            )
            if any(set(bound) - set(AXIS_NAMES) for bound in names.values()):
                return
        for main in reversed(outer):
            yield from self._by_name(states, identity, names, main)
        yield from self._without_id(states, identity, names, records, outer)

    def _without_id(
        self,
        states: Leaf,
        identity: Identity,
        names: Mapping[Prefix, Mapping[str, str]],
        records: list[Path_],
        outer: list[Prefix],
    ) -> Iterator[Identity]:
        """Yield the ways in which traces without an id next to them are told apart: by position, an axis, or a table."""
        is_batch = self._has_columns(states)
        if records and not outer:
            if is_batch:
                identity.items[states.files, records[0]] = "[chunk]"
            identity.mode, identity.letters = ("stack", "NLS") if is_batch else ("rows", "LS")
            yield identity
        elif not records and (not outer or is_batch):
            yield Identity("stack", {}, identity.names, None, identity.doubts, letters="NLS")
            if any("chunk" in bound for bound in names.values()):
                doubts = [*identity.doubts, "rows may be in another order than the files"]  # rule 13a
                yield Identity("stack", {}, {}, None, doubts, letters="NLS")
        if not records and outer == [(states.files, ())]:
            yield from self._by_file(states, names)

    def _add_items(self, states: Leaf, identity: Identity, records: list[Path_], outer: list[Prefix]) -> int | None:
        """Set what stands for the items on the way to the states; return which of them say the id, None if none do."""
        rows = [self.rows.of(states.files, prefix) for prefix in records]
        at = next((k for k, row in enumerate(rows) if "question_id" in row), None)
        for k, (prefix, row) in enumerate(zip(records, rows, strict=True)):
            is_first = k == 0 and not any(len(key[1]) < len(prefix) for key in outer)
            text = self._step(states, prefix, row, identity.doubts, is_first=is_first, has_id=at == k)
            identity.items[states.files, prefix] = text
        if at is not None:
            leaf = rows[at]["question_id"].leaf
            identity.ids = frozenset(texts_of(leaf.scalars))
            identity.doubts += [*self.rows.doubts_of_key(leaf), *self.rows.other_ids(leaf, records[at])]
        return at

    def _by_name(
        self, states: Leaf, identity: Identity, names: Mapping[Prefix, Mapping[str, str]], main: Prefix
    ) -> Iterator[Identity]:
        family = self.observation.families[main]
        texts = [bound["id"] for bound in family.members.values()]
        is_number = all(text.isdecimal() for text in texts)
        found = Identity(
            "ids", dict(identity.items), self._renamed(states, names, main), ids=frozenset(texts_of(texts))
        )
        found.doubts += identity.doubts
        found.doubts += _doubts_of_group(main[1][:-1]) if is_number else []
        if is_number and main[1] and not any("layer" in bound for bound in names.values()):
            layers = Identity("stack", dict(identity.items), dict(found.names), letters="NLS")
            layers.names[main] = {**layers.names.get(main, {}), "id": "layer"}
            layers.doubts.append("the numbers of the keys may be ids or layers")
            found.doubts.append("the numbers of the keys may be ids or layers")
            yield found
            yield layers
            return
        if not any(any(c.isdigit() for c in text) for text in texts) and len(texts) < 3:
            found.doubts.append("the names may be no ids")
        yield found

    def _in_order(self, states: Leaf) -> bool:
        """Return whether another file has a value for each of several traces, and no ids."""
        return any(m.leaf.files != states.files and m.leaf.rank == 1 and m.field for m in self.meanings)

    def _by_file(self, states: Leaf, names: Mapping[Prefix, Mapping[str, str]]) -> Iterator[Identity]:
        """Yield the identity of files that a table names."""
        stems = {name.rpartition("/")[2].partition(".")[0] for name in self.observation.files[states.files]}
        for meaning in self.meanings:
            leaf = meaning.leaf
            if leaf.files == states.files or leaf.rank or len(leaf.items_at) != 1 or leaf.kind != "s":
                continue
            values = {str(v).replace("\\", "/").rpartition("/")[2].partition(".")[0] for v in leaf.values}
            if meaning.field == "file" and values and values <= stems:
                prefix = leaf.path[: leaf.items_at[0] + 1]
                identity = Identity("ids", names=self._renamed(states, names, None))
                identity.items[leaf.files, prefix] = f"[file={'/'.join(leaf.path[len(prefix) :])}]"
                row = self.rows.of(leaf.files, prefix)
                identity.id_leaf = row["question_id"].leaf if "question_id" in row else None
                yield identity
                return

    def _own_id(self, states: Leaf) -> Leaf | None:
        """Return the scalar id next to states, whose keys or files are numbered or named."""
        if states.items_at:
            return None
        parents = {states.path[:k] for k in range(len(states.path))}
        found = [
            meaning
            for meaning in self.meanings
            if meaning.field == "question_id"
            and (meaning.leaf.files, meaning.leaf.rank) == (states.files, 0)
            and meaning.leaf.path[:-1] in parents
            and meaning.leaf.bound - set(AXIS_NAMES) == states.bound - set(AXIS_NAMES)
        ]
        return min(found, key=order_of).leaf if found else None

    def _has_columns(self, states: Leaf) -> bool:
        """Return whether a text or number for each of several traces lies next to states."""
        parents = {states.path[:k] for k in range(len(states.path))}
        for meaning in self.meanings:
            leaf = meaning.leaf
            is_beside = leaf.files == states.files and leaf.path[:-1] in parents
            is_column = leaf.rank == 1 and meaning.field in _COLUMNS
            is_matrix = leaf.rank == 2 and states.rank >= 3 and meaning.field in ("S.mask", "tokens")
            if is_beside and (is_column or is_matrix):
                return True
        return False

    def _names(self, leaf: Leaf) -> dict[Prefix, dict[str, str]]:
        """Return what files and keys of a leaf bind, by the place of the pattern."""
        found: dict[Prefix, dict[str, str]] = {}
        for k in range(len(leaf.path) + 1):
            place = (leaf.files, leaf.path[:k])
            family = self.observation.families.get(place)
            if family is not None and family.names and (k == 0 or "{" in leaf.path[k - 1]):
                found[place] = {name: name for name in family.names}
        return found

    def _renamed(
        self, states: Leaf, names: Mapping[Prefix, Mapping[str, str]], main: Prefix | None
    ) -> dict[Prefix, dict[str, str]]:
        """Return new names: only `main` binds an id, numbers below states are layers, chunks are parts of a key."""
        found: dict[Prefix, dict[str, str]] = {}
        for k, (place, bound) in enumerate(names.items()):
            changed: dict[str, str] = {}
            if "id" in bound and place != main:
                texts = [b["id"] for b in self.observation.families[place].members.values()]
                is_inner = place[1] and (main is None or len(place[1]) > len(main[1]))
                answers = [_ANSWER.fullmatch(text) for text in texts]
                if main is not None and is_inner and all(answers) and answers[0]:
                    changed["id"] = answers[0][1] + "{sample}"
                else:
                    changed["id"] = "n" if not place[1] else f"key{k}"
            if "chunk" in bound:
                changed["chunk"] = "n" if changed.get("id") != "n" and "id" not in bound else "part"
            if changed:
                found[place] = changed
        return found

    def _step(
        self,
        states: Leaf,
        prefix: Path_,
        row: Mapping[str, Meaning],
        doubts: list[str],
        *,
        is_first: bool,
        has_id: bool,
    ) -> str:
        """Return what stands for the items of a prefix on the way to the states."""
        pairs = []
        if has_id:
            pairs.append(("id", row["question_id"]))
        if "sample" in row:
            pairs.append(("sample", row["sample"]))
        bound = {name for names in self._names(states).values() for name in names}
        pairs += [(name, row[name]) for name in _BOUND_BY_ROWS if name in row and name not in bound]
        if pairs:
            relative = [(name, "/".join(m.leaf.path[len(prefix) :])) for name, m in pairs]
            return f"[{', '.join(f'{name}={path}' for name, path in relative)}]"
        if is_first:
            return "[]"
        words = set(words_of(prefix[-2] if len(prefix) > 1 and prefix[-2] != ITEMS else ""))
        if words & SAYING["tokens"]:
            return "[S]"
        if "generated_answer" in row:
            words |= _words_of_answers(states.files, prefix)
        if not words & SAYING["answers"]:
            doubts.append(f"{'/'.join(prefix)}: the items may be answers, steps or parts of a text")
        return "[K]" if words & SAYING["answers"] or states.rank >= 2 else "[S]"

    def binders(self, leaf: Leaf) -> list[Prefix]:
        """Return the places below the file at which items and names of a leaf tell traces apart."""
        found = [(leaf.files, leaf.path[: k + 1]) for k in leaf.items_at]
        found += [p for p, bound in self._names(leaf).items() if p[1] and set(bound) - set(AXIS_NAMES)]
        return sorted(found, key=lambda p: len(p[1]))

    # Addresses

    def address(self, leaf: Leaf, identity: Identity, states: Leaf) -> str | None:
        """Return the address of a leaf without axes; None if nothing joins it to the states, or a key has no name."""
        if "" in leaf.path:
            return None
        steps = []
        for k, step in enumerate(leaf.path):
            place = (leaf.files, leaf.path[: k + 1])
            if step == ITEMS:
                text = identity.items.get(place) or self._joined_rows(leaf, place[1], identity, states)
                if text is None:
                    return None
                identity.items[place] = text
                steps.append(text)
            else:
                steps.append(self._named(step, place, identity))
        files = self._named(leaf.files, (leaf.files, ()), identity, states.files)
        return files + (f" : {'/'.join(steps)}" if steps else "")

    def letters(self, leaf: Leaf, identity: Identity) -> frozenset[str]:
        """Return the letters that names and items of a leaf bind."""
        address = self.address(leaf, identity, leaf) or ""
        found = {letter for name, letter in AXIS_NAMES.items() if f"{{{name}}}" in address or f"{name}=" in address}
        return frozenset(found | {letter for letter in "SKP" if f"[{letter}]" in address})

    def is_output(self, leaf: Leaf, axes: Sequence[str] = ("L", "N")) -> bool:
        """Return whether an object of an output class of transformers has a leaf, whose axes are: passes, layers, batch."""
        beside = [m.leaf for m in self.meanings if m.leaf.place == (leaf.files, (*leaf.path[:-1], "@class"))]
        names = [str(name) for other in beside for name in other.scalars]
        is_output = bool(names) and all(name.startswith("transformers.") and "Output" in name for name in names)
        layers, batch, *_ = [*(letter for letter in axes if letter != "P"), "", ""]
        return is_output and (layers, batch) in (("L", "1"), ("L", "N")) and leaf.key in ("hidden_states", "attentions")

    def words_of_traces(self, leaf: Leaf, identity: Identity) -> set[str]:
        """Return the words of the list whose items have the ids of traces: they say nothing of what is in a trace."""
        lists = [k for k in leaf.items_at if "[id=" in identity.items.get((leaf.files, leaf.path[: k + 1]), "")]
        return {word for k in lists if k for word in words_of(leaf.path[k - 1])}

    def _named(self, text: str, place: Prefix, identity: Identity, like: str = "") -> str:
        names = identity.names.get(place)
        if names is None and like:  # files whose names bind the same as those of the states
            names = identity.names.get((like, ()))
        if names is None and place[1]:
            family = self.observation.families.get(place)
            if family is not None and "id" in family.names and text != ITEMS and self._binds_id_before(place, identity):
                names = {"id": "key"}
        for old, new in (names or {}).items():
            text = text.replace(f"{{{old}}}", new if "{" in new else f"{{{new}}}")
        return text

    def _binds_id_before(self, place: Prefix, identity: Identity) -> bool:
        files, path = place
        for k in range(len(path)):
            if "[id=" in identity.items.get((files, path[:k]), ""):
                return True
            family = self.observation.families.get((files, path[:k]))
            names = identity.names.get((files, path[:k]), {})
            if k and family is not None and "id" in family.names and names.get("id", "id") == "id":
                return True
        return False

    def _joined_rows(self, leaf: Leaf, prefix: Path_, identity: Identity, states: Leaf) -> str | None:
        """Return how the rows of a table are joined to the states, None if they are not."""
        row = self.rows.of(leaf.files, prefix)
        if sum(step == ITEMS for step in prefix) > 1:
            return None
        key = row.get("question_id")
        if key is not None and identity.mode == "ids":
            values = frozenset(texts_of(key.leaf.scalars))
            if not identity.ids or values & identity.ids or len(identity.ids) > len(values):
                identity.doubts += [d for d in self.rows.other_ids(key.leaf, prefix) if d not in identity.doubts]
                return f"[id={'/'.join(key.leaf.path[len(prefix) :])}]"
        if identity.mode == "ids":
            question = row.get("question")
            if question is not None and any(
                m.field == "question" and m.leaf.files == states.files for m in self.meanings
            ):
                return f"[question={'/'.join(question.leaf.path[len(prefix) :])}]"
            return None
        if key is not None and identity.mode == "stack" and self._ids_of_columns() & set(texts_of(key.leaf.scalars)):
            return f"[id={'/'.join(key.leaf.path[len(prefix) :])}]"
        return "[]"

    def _ids_of_columns(self) -> set[str]:
        columns = [m.leaf for m in self.meanings if m.field == "question_id" and m.leaf.rank == 1]
        return {text for column in columns if not column.items_at for text in texts_of(column.scalars)}


def _doubts_of_group(path: Path_) -> list[str]:
    """Return that the words before numbers may be a part of the ids, unless they name fields, axes or traces."""
    return [f"{'/'.join(path)} may be a part of the ids"] if unknown_words(" ".join(path)) else []


def _words_of_answers(files: str, prefix: Path_) -> set[str]:
    """Return the words of files and keys by which items, each with an answer, belong to one question."""
    every = {word for piece in (files, *prefix) for word in words_of(without_names(piece))}
    return set() if every & {"step", "steps", "turn", "turns"} else every & {"sampled", "samples", "generations"}
