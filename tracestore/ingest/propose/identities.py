"""Places of leaves as addresses: how items and names identify traces, and how tables are joined."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tracestore.ingest.execute.values import key_text
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.leaves import ITEMS, Leaf, Observation, Path_
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import Meaning
from tracestore.ingest.propose.names import SAMPLE, front_of, named, unknown_words, words_of, words_of_answers
from tracestore.store.vocabulary import COUNTED, SAYING

Prefix = tuple[str, Path_]
Names = Mapping[Prefix, tuple[str, ...]]  # what the patterns of names bind
Row = dict[str, Meaning]  # the scalars of the items of a prefix by their field
_COLUMNS = frozenset(("question_id", "question", "generated_answer", "S.lengths", "S.offsets", "verdict"))
_SHARD = re.compile(r"\{chunk\}[-_. ]?of[-_. ]?\d")
_ORDER_OF_FILES = "rows may be in another order than the files"  # rule 13a
_OF_NUMBERS = frozenset(("id", "idx", "index", "number", "no", "num"))  # behind the word of what is counted
_BOUND_BY_ROWS = ("layer", "token", "step", "dim")


@dataclass
class Identity:
    """A way to tell traces apart.

    Attributes
    ----------
    mode : str
        "ids": items, keys or names say the id; "stack": an axis N; "rows": items by position.
    items, names : dict
        What stands for the items of a prefix, such as ``[id=qid]``, and new names of what files and keys bind.
    id_leaf : Leaf or None
        The leaf of a line question_id.
    doubts : list of str
        Why the ids are not proved.
    ids, has_all_ids : frozenset of str, bool
        The ids that were seen, and whether these are the ids of all traces.
    """

    mode: str
    items: dict[Prefix, str] = field(default_factory=dict)
    names: dict[Prefix, dict[str, str]] = field(default_factory=dict)
    id_leaf: Leaf | None = None
    doubts: list[str] = field(default_factory=list)
    ids: frozenset[str] = frozenset()
    has_all_ids: bool = True


class Places:
    """The leaves of an observation by their records, and the identities that they allow."""

    def __init__(self, observation: Observation, meanings: list[Meaning]) -> None:
        self.observation, self.meanings = observation, meanings

    def identities(self, states: Leaf) -> Iterator[Identity]:
        """Yield the ways in which the traces of states may be told apart, with how tables are joined to them."""
        places = {(m.leaf.files, m.leaf.path[: k + 1]) for m in self.meanings for k in m.leaf.items_at}
        for identity in self._identities(states):
            rows = {
                place: self._joined_rows(place, identity, states) for place in sorted(places - identity.items.keys())
            }
            identity.items |= {place: text for place, text in rows.items() if text is not None}
            if rows and all("chunk=" in text for text in rows.values() if text is not None):
                identity.doubts = [doubt for doubt in identity.doubts if doubt != _ORDER_OF_FILES]
            yield identity

    def _identities(self, states: Leaf) -> Iterator[Identity]:
        names = self._names(states)
        records = [states.path[: k + 1] for k in states.items_at]
        outer = [key for key, bound in names.items() if "id" in bound]
        identity = Identity("ids", names=self._renamed(names, None))
        identity.doubts += [doubt for key in names if (doubt := self.observation.families[key].doubt)]
        if (leaf := self._add_items(states, identity, records, outer)) is None:
            leaf = identity.id_leaf = self._own_id(states)
        if leaf is not None:
            yield self._with_ids_of(leaf, identity, states)
            return
        for main in reversed(outer):
            yield self._by_name(identity, names, main)
        is_batch = self._has_columns(states)
        if records and not outer:
            if is_batch:
                identity.items[states.files, records[0]] = "[chunk]"
            yield replace(identity, mode="stack" if is_batch else "rows")
        elif not records and (not outer or is_batch):
            yield replace(identity, mode="stack", items={})
            if any("chunk" in bound for bound in names.values()):
                yield Identity("stack", doubts=[*identity.doubts, _ORDER_OF_FILES])
        if not records and outer == [(states.files, ())]:
            yield from self._by_file(states, names)

    def _with_ids_of(self, leaf: Leaf, identity: Identity, states: Leaf) -> Identity:
        identity.doubts += self._doubts_of_key(leaf) if identity.id_leaf is not None else []
        if self.observation.counts_files(states.files, texts := texts_of(leaf.scalars)):
            identity.names.setdefault((states.files, ()), {})["sample"] = "number"
        return replace(identity, ids=frozenset(texts), has_all_ids=self.observation.is_whole(leaf))

    def _add_items(self, states: Leaf, identity: Identity, records: list[Path_], outer: list[Prefix]) -> Leaf | None:
        """Set what stands for the items on the way to the states; return the leaf of the ids that some of them say."""
        rows = [self.row(states.files, prefix) for prefix in records]
        at = next((k for k, row in enumerate(rows) if "question_id" in row), None)
        for k, (prefix, row) in enumerate(zip(records, rows, strict=True)):
            is_first = k == 0 and not any(len(key[1]) < len(prefix) for key in outer)
            text = self._step(states, prefix, row, identity.doubts, is_first=is_first, has_id=at == k)
            identity.items[states.files, prefix] = text
        if at is None:
            return None
        leaf = rows[at]["question_id"].leaf
        identity.doubts += [*self._doubts_of_key(leaf), *self._other_ids(leaf, records[at])]
        return leaf

    def _by_name(self, identity: Identity, names: Names, main: Prefix) -> Identity:
        texts = [bound["id"] for bound in self.observation.families[main].members.values()]
        doubts = list(identity.doubts)
        group = main[1][:-1]
        if all(text.isdecimal() for text in texts):
            # The words before numbers may be a part of the ids, unless they name fields, axes or traces.
            doubts += [f"{'/'.join(group)} may be a part of the ids"] if unknown_words(" ".join(group)) else []
            if main[1] and not any("layer" in bound for bound in names.values()):
                doubts.append("the numbers of the keys may be ids or layers")
        elif len(texts) < 3 and not any(char.isdigit() for text in texts for char in text):
            doubts.append("the names may be no ids")
        renamed = self._renamed(names, main)
        texts = self._as_in_table(main, texts, renamed, doubts)
        return Identity("ids", dict(identity.items), renamed, doubts=doubts, ids=frozenset(texts_of(texts)))

    def _as_in_table(
        self, main: Prefix, texts: list[str], renamed: dict[Prefix, dict[str, str]], doubts: list[str]
    ) -> list[str]:
        """Return the ids of names as a table has them; add what the names bind for it."""
        numbers = {text.lstrip("0") or "0" for text in texts if text.isdecimal()}
        rows = {text for m in self.meanings if m.field == "question_id" for text in texts_of(m.leaf.scalars)}
        if len(numbers) == len(texts) and rows.isdisjoint(texts) and not rows.isdisjoint(numbers):
            renamed.setdefault(main, {})["id"] = "id:d"
            doubts.append("the ids of a table have no zeros in front")
            return sorted(numbers)
        if rows.isdisjoint(texts) and (front := front_of((main[1] or main[:1])[-1], texts, rows)):
            renamed.setdefault(main, {})[front + "{id}"] = "{id}"
            doubts.append(f"{front}: ids of the table begin with this part of the names")
            return [front + text for text in texts]
        return texts

    def _by_file(self, states: Leaf, names: Names) -> Iterator[Identity]:
        """Yield the identity of files for each column of a table that names them, and that of batches."""
        stems = {_stem(name) for name in self.observation.files[states.files]}
        found: list[list[str]] = []
        for meaning in sorted(self.meanings, key=lambda m: m.field != "file"):
            leaf, is_named = meaning.leaf, meaning.field == "file"
            values = [_stem(str(value).replace("\\", "/")) for value in leaf.scalars]
            is_table = leaf.files != states.files and not leaf.rank and len(leaf.items_at) == 1
            may_name = is_named or (leaf.number_kind == "s" and meaning.field != "question_id")
            is_said = is_named or len(set(values)) == len(values)
            if may_name and is_table and is_said and values and stems.issuperset(values) and values not in found:
                found.append(values)
                prefix = leaf.path[: leaf.items_at[0] + 1]
                items = {(leaf.files, prefix): f"[file={'/'.join(leaf.path[len(prefix) :])}]"}
                row = self.row(leaf.files, prefix)
                id_leaf = row["question_id"].leaf if "question_id" in row else None
                doubts = [] if is_named else [f"{leaf.key}: the files that it names may be those of other rows"]
                yield Identity("ids", items, self._renamed(names, None), id_leaf, doubts)
        if self.observation.has_batches(states):
            doubts = ["the files may be traces and their rows tokens, not the rows of batches"]
            yield Identity("stack", names={(states.files, ()): {"id": "chunk"}}, doubts=doubts)

    def _own_id(self, states: Leaf) -> Leaf | None:
        """Return the scalar id next to states, whose keys or files are numbered or named."""
        names = states.bound - AXIS_NAMES.keys()
        ids = [m for m in self._beside(states) if m.field == "question_id" and not m.leaf.rank]
        found = [m for m in ids if m.leaf.bound - AXIS_NAMES.keys() == names]
        return min(found, key=lambda meaning: meaning.order).leaf if found and not states.items_at else None

    def _has_columns(self, states: Leaf) -> bool:
        """Return whether a text or number for each of several traces lies next to states."""
        return any(
            (meaning.leaf.rank == 1 and meaning.field in _COLUMNS)
            or (meaning.leaf.rank == 2 and states.rank >= 3 and meaning.field in ("S.mask", "tokens"))
            for meaning in self._beside(states)
        )

    def _beside(self, states: Leaf) -> list[Meaning]:
        """Return the leaves next to states, or next to what holds them."""
        parents = {(states.files, states.path[:k]) for k in range(len(states.path))}
        return [meaning for meaning in self.meanings if (meaning.leaf.files, meaning.leaf.path[:-1]) in parents]

    def _names(self, leaf: Leaf) -> Names:
        """Return what files and keys of a leaf bind, by the place of the pattern."""
        places = [(leaf.files, leaf.path[:k]) for k in range(len(leaf.path) + 1)]
        families = self.observation.families
        return {place: families[place].names for place in places if place in families and families[place].names}

    def classes(self, leaf: Leaf) -> list[str]:
        """Return the words for the class of an answer that files and keys of a leaf bind."""
        places = [place for place, bound in self._names(leaf).items() if "verdict" in bound]
        return list(dict.fromkeys(b["verdict"] for p in places for b in self.observation.families[p].members.values()))

    def _renamed(self, names: Names, main: Prefix | None) -> dict[Prefix, dict[str, str]]:
        """Return new names: only `main` binds an id, numbers of answers below it are samples, chunks are parts of a key."""
        found: dict[Prefix, dict[str, str]] = {}
        for k, (place, bound) in enumerate(names.items()):
            changed: dict[str, str] = {}
            if "id" in bound and place != main:
                members = self.observation.families[place].members
                is_inner = main is not None and len(place[1]) > len(main[1])
                changed["id"] = "n" if not place[1] else f"key{k}"
                if is_inner and all(map(SAMPLE.fullmatch, members)):
                    # `response_0` is an id as a whole, of `gen_0` the number alone.
                    changed["id"] = next(iter(members.values()))["id"].rstrip("0123456789") + "{sample}"
            if "chunk" in bound:
                changed["chunk"] = "n" if "id" not in bound else "part"
                if _SHARD.search(place[0]):
                    changed["chunk"] = "*"  # the shards of one data set, cut by size
            if changed:
                found[place] = changed
        return found

    # Records

    def row(self, files: str, prefix: Path_) -> Row:
        """Return the scalars of the items of a prefix by their field, the best of each."""
        found: Row = {}
        for meaning in self.meanings:
            leaf, rest = meaning.leaf, meaning.leaf.path[len(prefix) :]
            is_inner = leaf.place == (files, prefix + rest) and 0 < len(rest) <= 2 and not rest[0].startswith("@")
            if not is_inner or leaf.rank or not meaning.field or any(s == ITEMS or "{" in s for s in rest):
                continue
            if meaning.field in found and meaning.order >= found[meaning.field].order:
                if meaning.is_number_of_answer:
                    found["sample"] = Meaning(leaf, "sample")
            else:
                found[meaning.field] = meaning
        ids = texts_of(found["question_id"].leaf.scalars) if "question_id" in found else []
        if len(set(ids)) == len(ids) > 0:
            found.pop("sample", None)  # ids that do not repeat need no number of an answer
        return found

    def number_of_answer(self, own: Leaf) -> Meaning | None:
        """Return the number of an answer next to ids that repeat, None without one."""
        if own.items_at:
            return self.row(own.files, own.path[: own.items_at[0] + 1]).get("sample")
        is_file = not own.path
        beside = [m for m in self.meanings if m.leaf is not own and m.leaf.rank == own.rank and not m.leaf.items_at]
        beside = [m for m in beside if (m.leaf.files == own.files) != is_file and m.leaf.path[:-1] == own.path[:-1]]
        has_copies = len(set(texts_of(own.scalars))) < len(own.scalars)
        return next((m for m in beside if has_copies and (m.field == "sample" or m.is_number_of_answer)), None)

    def _other_ids(self, leaf: Leaf, prefix: Path_) -> list[str]:
        """Return a doubt where several keys of a record may be its id."""
        sample = self.row(leaf.files, prefix).get("sample")
        keys = {
            m.leaf.key
            for m in self.meanings
            if m.field == "question_id" and m.leaf.files == leaf.files and m.leaf.rank == 0
            and m.leaf.path[: len(prefix)] == prefix and ITEMS not in m.leaf.path[len(prefix) :]
            and m.leaf is not leaf and (sample is None or m.leaf is not sample.leaf)
        }  # fmt: skip
        return [f"{leaf.key}: the id may be {', '.join(sorted(keys))}"] if keys else []

    def _doubts_of_key(self, leaf: Leaf) -> list[str]:
        """Rule 20: integers are ids only if no word says otherwise and no file repeats them."""
        files = self.observation.files[leaf.files]
        is_index = not {"idx", "index", "indices", "n"}.isdisjoint(words_of(leaf.key))
        is_part = any(not SAYING["parts of a run"].isdisjoint(words_of(name)) for name in files)
        is_doubtful = leaf.number_kind == "i" and (is_part or (is_index and len(files) > 1))
        return [f"{leaf.key}: integers next to names of parts may be ids of each part"] if is_doubtful else []

    def _step(self, states: Leaf, prefix: Path_, row: Row, doubts: list[str], *, is_first: bool, has_id: bool) -> str:
        """Return what stands for the items of a prefix on the way to the states."""
        keys = {"id": "question_id"} if has_id else {}
        keys |= {name: name for name in ("sample", *_BOUND_BY_ROWS) if name not in states.bound or name == "sample"}
        pairs = [f"{name}={'/'.join(row[key].leaf.path[len(prefix) :])}" for name, key in keys.items() if key in row]
        if pairs:
            return f"[{', '.join(pairs)}]"
        if is_first:
            return "[]"
        words = set(words_of(prefix[-2]) if len(prefix) > 1 else ())
        if words & SAYING["tokens"]:
            return "[S]"
        if "generated_answer" in row:
            words |= words_of_answers(states.files, prefix)
        if not words & SAYING["answers"]:
            doubts.append(f"{'/'.join(prefix)}: the items may be answers, steps or parts of a text")
        return "[K]" if words & SAYING["answers"] or states.rank >= 2 else "[S]"

    def binders(self, leaf: Leaf) -> set[Prefix]:
        """Return the places below the file at which items and names of a leaf tell traces apart."""
        items = {(leaf.files, leaf.path[: k + 1]) for k in leaf.items_at}
        return items | {p for p, bound in self._names(leaf).items() if p[1] and set(bound) - set(AXIS_NAMES)}

    # Addresses

    def address(self, leaf: Leaf, identity: Identity, states: Leaf) -> str | None:
        """Return the address of a leaf without axes; None if nothing joins it, a key has no name, or two have one."""
        if "" in leaf.path:
            return None
        steps = []
        for k, step in enumerate(leaf.path):
            place = (leaf.files, leaf.path[: k + 1])
            if step == ITEMS and place not in identity.items:
                return None
            steps.append(identity.items[place] if step == ITEMS else named(step, identity.names.get(place)))
        # Files whose names bind the same as those of the states.
        names = identity.names.get((leaf.files, ()), identity.names.get((states.files, ())))
        text = named(leaf.files, names) + (f" : {'/'.join(steps)}" if steps else "")
        bound = re.findall(r"(?<!\\)\{(\w+)|[\[ ](\w+)=", text)
        return text if len(set(map(max, bound))) == len(bound) else None

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
        front = tuple(letter for letter in axes if letter != "P")[:2]
        return is_output and front in (("L", "1"), ("L", "N")) and leaf.key in ("hidden_states", "attentions")

    def words_of_traces(self, leaf: Leaf, identity: Identity) -> set[str]:
        """Return the words of the list whose items have the ids of traces: they say nothing of what is in a trace."""
        lists = [k for k in leaf.items_at if "[id=" in identity.items.get((leaf.files, leaf.path[: k + 1]), "")]
        return {word for k in lists if k for word in words_of(leaf.path[k - 1])}

    def with_ids(self, leaf: Leaf, identity: Identity) -> Leaf:
        """Return a leaf whose spots bind the id, or the file, that their rows say."""
        for k in leaf.items_at:
            prefix = leaf.path[: k + 1]
            text = identity.items.get((leaf.files, prefix), "")[1:-1].partition(",")[0]
            name, _, key = text.partition("=")
            column = (leaf.files, (*prefix, *key.split("/")))
            cells = [spot for m in self.meanings if m.leaf.place == column for spot in m.leaf.spots]
            if name in ("id", "file") and cells:
                row = f"[{k}]{'/'.join(leaf.path[:k])}"
                ids = {(s.where["F"], s.where[row]): key_text(s.value) for s in cells if s.value is not None}
                ids = {at: _stem(text) if name == "file" else text for at, text in ids.items()}
                spots = [(spot, ids.get((spot.where["F"], spot.where[row]), "")) for spot in leaf.spots]
                return replace(leaf, spots=[replace(spot, where={**spot.where, "id": text}) for spot, text in spots])
        return leaf

    def _joined_rows(self, place: Prefix, identity: Identity, states: Leaf) -> str | None:
        """Return how the rows of a table are joined to the states, None if they are not."""
        files, prefix = place
        if prefix.count(ITEMS) > 1:
            return None
        if identity.mode != "ids":
            return (self._position(place, identity, states) if identity.mode == "stack" else None) or "[]"
        key = self.row(files, prefix).get("question_id")
        if key is None:
            return self._numbered_rows(place, identity) if files != states.files else None
        values = frozenset(texts_of(key.leaf.scalars))
        is_whole = identity.has_all_ids or self.observation.is_whole(key.leaf)
        if is_whole and identity.ids and not values & identity.ids and len(identity.ids) <= len(values):
            return None
        identity.doubts += [d for d in self._other_ids(key.leaf, prefix) if d not in identity.doubts]
        return f"[id={'/'.join(key.leaf.path[len(prefix) :])}]"

    def _numbered_rows(self, place: Prefix, identity: Identity) -> str | None:
        """Return what joins the rows of a table by their numbers, None unless these are the ids of as many traces."""
        counts = {len(m.leaf.spots) for m in self.meanings if (m.leaf.files, m.leaf.path[: len(place[1])]) == place}
        if counts != {len(identity.ids)} or identity.ids != set(map(str, range(len(identity.ids)))):
            return None
        identity.doubts.append(f"{place[0]}: the numbers in the names may not be those of its rows")
        return "[id=#]"

    def _position(self, place: Prefix, identity: Identity, states: Leaf) -> str | None:
        """Return how columns with the numbers of batches and their rows join a table with other ids, None without them."""
        ids = self.row(*place).get("question_id")
        columns: dict[str | None, Leaf] = {}
        for leaf in (meaning.leaf for meaning in self.meanings if meaning is not ids):
            if (leaf.files, leaf.path[:-1]) == place and leaf.number_kind == "i" and not leaf.rank:
                first, *others = words_of(leaf.key) or ("",)  # a name without a letter
                if SAYING["numbers of rows"].issuperset((first, *others)):
                    columns["N"] = leaf
                elif _OF_NUMBERS.issuperset(others):
                    columns[COUNTED.get(first)] = leaf
        if ids is None or "N" not in columns:
            return None
        key, values = columns["N"].path[-1], list(map(int, columns["N"].scalars))
        if "chunk" in columns:
            numbers = list(map(int, columns["chunk"].scalars))
            members = self.observation.families[states.files, ()].members.values()
            is_joined = {*numbers} <= {int(bound.get("chunk", -1)) for bound in members} and not identity.names
            is_joined &= len({*zip(numbers, values, strict=False)}) == len(values)
            joined = f"chunk={columns['chunk'].path[-1]}, N={key}"
        else:
            is_joined = not columns["N"].is_counter and len({value for value in values if value >= 0}) == len(values)
            joined = f"N={key}"
        if is_joined:
            identity.doubts.append(f"{joined}: the numbers may be those of another order")
        return f"[{joined}]" if is_joined else None


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]
