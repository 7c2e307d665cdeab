"""Names as patterns: what varies in the names of files and keys, and what the words next to it say."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tracestore.ingest.layout.fields import FIELDS
from tracestore.store import vocabulary

# The names of types, digests, such as 1ffa3228, and negative numbers are one piece. A sign follows no letter or digit.
_TYPE = r"(?:(?:bf|fp|bfloat|float)(?:16|32)|b(?:ase)?64)(?![^\W_])"
_DIGEST = r"(?=[a-f]*\d)(?=\d*[a-f])[a-f\d]{8,}(?![^\W_])"
# The number of shards behind that of one: part-00001-of-00003.
_TOTAL = r"[-_. ]?of[-_. ]?\d+(?![^\W_])"
_RUN = re.compile(r"(?<![^\W_])[^\W_]+")
_RUN_OF_LETTERS_OR_DIGITS = re.compile(r"[^\W\d_]+|\d+")
# Hexadecimal digits, as in d2d4, which may be a piece of a random id.
_HEX = re.compile(r"[a-f\d]{4,}")
_NEGATIVE = r"(?<![^\W_])-(?=\d)"
_TOKEN = re.compile(rf"{_TYPE}|(?<=\d){_TOTAL}|{_DIGEST}|[^\W\d_]+|(?:{_NEGATIVE})?\d+|(?:(?!{_NEGATIVE})[\W_])+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD = re.compile(r"[^\W\d_]+")
# The doubt of numbers in names of files and keys next to an id.
NUMBERS_OF_NAMES = "no word says that the numbers of names are layers"
_BOUND = re.compile(r"\{[^}]*\}")
# That of a compressed file has two parts.
_SUFFIX = re.compile(r"(\.[a-z]\w*)?\.(gz|bz2|xz|zst|z|zlib)$|\.[^./]*$", re.IGNORECASE)
_SPECIAL = re.compile(r"([\\*{])")
_END = re.compile(r"[^\W\d_]*[_\-.=]?\Z")  # the last word, and what separates it from a number
# The number of an answer, behind the word that names it.
SAMPLE = re.compile(r"((?:sample|response|generation|answer|gen)[_\-.=]?)(\d+)", re.IGNORECASE)


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case, without numbers."""
    return tuple(word.lower() for word in _WORD.findall(_CAMEL.sub("_", name)))


def is_integer(text: str) -> bool:
    """Return whether a text is an integer, with a sign if it is negative."""
    return text.removeprefix("-").isdecimal()


def without_names(step: str) -> str:
    """Return a pattern without what it binds."""
    return _BOUND.sub(" ", step).lstrip("@")


def contains(words: Sequence[str], phrase: tuple[str, ...]) -> bool:
    """Return whether a phrase lies in words."""
    return any(tuple(words[k : k + len(phrase)]) == phrase for k in range(len(words) - len(phrase) + 1))


@lru_cache(maxsize=1)
def known_words() -> frozenset[str]:
    """Return the words of which names of fields and axes consist."""
    synonyms = [name for names in vocabulary.SYNONYMS.values() for name in names]
    names = [*FIELDS, *vocabulary.SYNONYMS, *synonyms, *vocabulary.NEEDLESS, *vocabulary.SCORES, "label", "labels"]
    found = frozenset(word for name in names for word in words_of(name) if len(word) > 1) - vocabulary.SAYING["traces"]
    return found | (vocabulary.COUNTED.keys() - {"d"}) | vocabulary.SAYING["plain"] | {"prompt", "answer", "response"}


def unknown_words(name: str) -> list[str]:
    """Return the words of a name that name neither fields, axes and parts of data sets nor traces."""
    words = known_words() | vocabulary.SAYING["traces"] | vocabulary.SPLITS | {"id", "batch"}
    return [word for word in words_of(name) if word not in words and word.removesuffix("s") not in words]


def words_of_answers(files: str, path: Sequence[str]) -> set[str]:
    """Return the words of files and keys by which items, each with an answer, belong to one question."""
    every = {word for piece in (files, *path) for word in words_of(without_names(piece))}
    return set() if every & {"step", "steps", "turn", "turns"} else every & {"sampled", "samples", "generations"}


def escape(text: str) -> str:
    """Return text whose characters a pattern takes literally."""
    return _SPECIAL.sub(r"\\\1", text)


def named(text: str, names: Mapping[str, str] | None) -> str:
    """Return a pattern with other names, or with a pattern instead of a name."""
    for old, new in (names or {}).items():
        text = text.replace(old if "{" in old else f"{{{old}}}", new if "{" in new or new == "*" else f"{{{new}}}")
    return text


def front_of(pattern: str, texts: Sequence[str], rows: set[str]) -> str:
    """Return the text in front of the ids in names with which the ids of a table begin, "" if there is none."""
    front = re.findall(r"([^/{}\\]*)\{id\}", pattern)
    begins = [match.start() for match in re.finditer(r"(?<![^\W_])[^\W_]", front[0])] if front else []  # of words
    fronts = [front[0][k:] for k in begins]
    return next((one for one in fronts if not rows.isdisjoint(one + text for text in texts)), "")


@dataclass(frozen=True)
class Family:
    """Names of one pattern.

    Attributes
    ----------
    pattern : str
        In the language of layouts: ``layer_{layer}``.
    members : dict
        What each name binds.
    doubt : str
        Why what the names bind is not proved.
    """

    pattern: str
    members: dict[str, dict[str, str]]
    doubt: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the pattern binds."""
        return tuple(next(iter(self.members.values()), {}))


# Text and kind: "" literal, "." a separator, "?" an unknown word or number, "#" a word of traces in front of a number,
# else what a number counts.
Piece = tuple[str, str]


def families(names: Iterable[str], *, is_path: bool = False) -> list[Family]:
    """Return the patterns of names of files or keys.

    Parameters
    ----------
    names : iterable of str
    is_path : bool
        Whether the names are paths, whose suffix is literal. Of keys, an unknown word with a digit is an id, also where
        it does not vary.
    """
    groups: dict[tuple[str, ...], dict[str, list[Piece]]] = defaultdict(dict)
    names = list(names)
    ids = _pieces_of_ids(names)
    classes = _classes(names) if is_path else {}
    for name in names:
        suffix = _SUFFIX.search(name) if is_path else None
        end = len(name) if suffix is None else suffix.start()
        start, stop = classes.get(name, (0, 0))
        found_class = [*_pieces(name[:start], ids), (name[start:stop], "verdict")] if stop else []
        pieces = _with_samples(_merged([*found_class, *_pieces(name[stop:end], ids), (name[end:], "")]))
        groups[tuple(text if what == "" else f"\0{what}" for text, what in pieces)][name] = pieces
    found = [family for members in groups.values() for family in _families_of(members, is_path=is_path)]
    return [_with_id(family, found) for family in found] if is_path else found


def _classes(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return where names have a folder of one class next to that of the other one: correct/, or yes_hallucination/."""
    found: dict[tuple[int, str, str], dict[str, tuple[str, bool | None]]] = defaultdict(dict)
    for level, folder in {pair for name in names for pair in enumerate(name.split("/")[:-1])}:
        if (is_correct := vocabulary.is_class_correct(folder)) is not None:
            found[level, "", ""][folder] = folder, is_correct
        for match in _RUN_OF_LETTERS_OR_DIGITS.finditer(folder):
            front, back = folder[: match.start()], folder[match.end() :]
            around = (front + back).strip("_-. ")  # yes and no are answers to what is around them
            is_class = not (around or match[0].isdecimal()) or vocabulary.is_named_as_verdict(around)
            truth = vocabulary.CLASSES.get(match[0].lower()) if is_class else None
            if truth is not None or front + back:
                found[level, front, f"{back}/"][folder] = match[0], truth
    spans: dict[str, tuple[int, int]] = {}
    for (level, front, _), folders in found.items():
        if {truth for _, truth in folders.values()} == {True, False}:
            for name in names:
                parts = name.split("/")
                if len(parts) > level + 1 and parts[level] in folders:
                    start = len("/".join(parts[:level])) + bool(level) + len(front)
                    spans[name] = start, start + len(folders[parts[level]][0])
    return spans


def _with_id(family: Family, others: Iterable[Family]) -> Family:
    """Return names such as tok_3 with ids instead of the numbers of tokens, where others, as hs_3, have the same ids."""
    if family.names != ("token",):
        return family
    ids = {tuple(sorted(bound["id"] for bound in other.members.values())) for other in others if other.names == ("id",)}
    if tuple(sorted(bound["token"] for bound in family.members.values())) not in ids:
        return family
    members = {name: {"id": bound["token"]} for name, bound in family.members.items()}
    return Family(family.pattern.replace("{token}", "{id}"), members, family.doubt)


def _pieces_of_ids(names: Iterable[str]) -> set[str]:
    """Return hexadecimal pieces of random ids: of one length at one place of the names, not all a word and a number."""
    columns: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        if _HEX.search(name):
            between = _RUN.sub("\0", name)
            for k, run in enumerate(_RUN.findall(name)):
                columns[between, k].add(run)
    found: set[str] = set()
    for runs in columns.values():
        forms = {re.sub(r"[a-f]+", "a", re.sub(r"\d+", "0", run)) for run in runs}
        # Of one form, as 001a and 002b or c1a0 and c2a1, they may be numbers of several things.
        is_random = len(forms) > 1 or (len(runs) == 1 and not forms <= {"0", "a", "a0"})
        if is_random and len({len(run) for run in runs}) == 1 and all(map(_HEX.fullmatch, runs)):
            found |= runs
    return found


def _tokens(name: str, ids: Container[str]) -> list[str]:
    """Return the words, numbers and separators of a name; pieces of random ids are whole."""
    found, end = [], 0
    for token in _TOKEN.finditer(name):
        if token.start() >= end:
            run = _RUN.match(name, token.start())
            piece = run if run is not None and run[0] in ids else token
            found.append(piece[0])
            end = piece.end()
    return found


def _pieces(name: str, ids: Container[str]) -> list[Piece]:
    """Return the pieces of a name: words that are known, numbers that a word counts, and what may be an id."""
    found: list[Piece] = []
    tokens = [*_tokens(name, ids), "", ""]
    counted = ""  # what the next number counts
    for token, following, second in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if re.fullmatch(rf"{_TYPE}|{_TOTAL}", token):
            found.append((token, ""))
        elif token in ids or (token.lstrip("-").isalnum() and not token.isalpha()):
            is_trace = any(what == "#" for _, what in found[-2:])  # question_1_of_3
            counted = counted or ("chunk" if re.fullmatch(_TOTAL, following) and not is_trace else "")
            found.append((token, counted if counted and is_integer(token) and token not in ids else "?"))
            counted = ""
        elif not token[0].isalpha():
            found.append((token, "."))
            counted = "" if len(token) > 2 or "/" in token else counted
        else:
            is_glued = following[:1].isdigit()
            what, counted = _word(token, is_counting=is_glued or is_integer(second), is_glued=is_glued)
            found.append((token, what))
    return found


def _word(token: str, *, is_counting: bool, is_glued: bool) -> tuple[str, str]:
    """Return what a word is, and what the number behind it counts."""
    words = words_of(token)
    last = words[-1] if words else ""
    if is_counting and last in vocabulary.SAYING["traces"]:
        return "#", ""
    if is_counting and last in vocabulary.COUNTED:
        return "", vocabulary.COUNTED[last]
    if last in vocabulary.SPLITS:
        return "split", ""
    if vocabulary.score_of_word(last, None) is not None:
        return "verdict", ""
    return ("" if not is_glued and known_words().issuperset(words) else "?"), ""


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with those of an id as one, and separators as literal text."""
    merged: list[Piece] = []
    for k, (text, what) in enumerate(pieces):
        follows_id = bool(merged) and merged[-1][1] in ("?", "#")
        is_inner = what == "." and "/" not in text and k + 1 < len(pieces) and pieces[k + 1][1] in ("?", "#")
        if follows_id and (is_inner or what in ("?", "#")):
            merged[-1] = (merged[-1][0] + text, merged[-1][1] if is_inner else "?")
        else:
            merged.append((text, what))
    return _joined((text, "" if what in ("#", ".") else what) for text, what in merged)


def _with_samples(pieces: list[Piece]) -> list[Piece]:
    """Return pieces in which the number of an answer is none of the ids, where another piece may be the id."""
    if sum(what == "?" for _, what in pieces) < 2:
        return pieces
    found: list[Piece] = []
    for text, what in pieces:
        # A word such as gen names fields, too: it lies in the literal text in front of the number.
        word = _END.findall(found[-1][0])[0] if found and not found[-1][1] and text.isdecimal() else ""
        match = SAMPLE.fullmatch(word + text) if what == "?" else None
        found += [(text, what)] if match is None else [(match[1].removeprefix(word), ""), (match[2], "sample")]
    return _joined(found)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with literal texts behind each other as one."""
    found: list[Piece] = []
    for text, what in pieces:
        if found and what == found[-1][1] == "":
            found[-1] = (found[-1][0] + text, "")
        elif text:
            found.append((text, what))
    return found


def _families_of(members: dict[str, list[Piece]], *, is_path: bool) -> list[Family]:
    """Return names with the same literal pieces as one pattern; as themselves if nothing of them is one."""
    names, doubt = _names_of([list(column) for column in zip(*members.values(), strict=True)], is_path=is_path)
    if not any(names) or any(one and two for one, two in itertools.pairwise(names)):
        return [Family(escape(name), {name: {}}) for name in members]
    bound = {
        name: {key: text for key, (text, _) in zip(names, pieces, strict=True) if key}
        for name, pieces in members.items()
    }
    first = zip(names, next(iter(members.values())), strict=True)
    pattern = "".join(f"{{{name}}}" if name else escape(text) for name, (text, _) in first)
    if "-{layer}" in pattern and not any(int(texts["layer"]) == 0 for texts in bound.values()):
        doubt = "the hyphen in front of the layers may be a sign"
    if "id" in names and _has_pieces([texts["id"] for texts in bound.values()]):
        doubt = "the id has a piece without which ids repeat"
    return [Family(pattern, bound, doubt)]


def _names_of(columns: Sequence[list[Piece]], *, is_path: bool) -> tuple[list[str], str]:
    """Return what each column of pieces binds, "" for literal text, and why that is not proved."""
    varying = [
        bool(column[0][1]) and (len(set(column)) > 1 or _is_pattern(column[0], is_path=is_path)) for column in columns
    ]
    ids = [k for k, column in enumerate(columns) if varying[k] and column[0][1] == "?"]
    numbers = {k for k in ids if all(is_integer(text) for text, _ in columns[k])}
    # The part that tells most names apart is the id, one with letters before a number.
    main = max(ids, key=lambda k: (k not in numbers, len(set(columns[k])), k), default=None)
    names: list[str] = []
    doubt = ""
    for k, column in enumerate(columns):
        what = "id" if k == main else column[0][1]
        if what == "?" and k in numbers and "layer" not in names:
            what, doubt = "layer", NUMBERS_OF_NAMES
        elif what == "?" or what in names:
            what = f"part{k}"
        names.append(what if varying[k] else "")
    return names, doubt


def _is_pattern(piece: Piece, *, is_path: bool) -> bool:
    """Return whether a piece is a pattern also where it does not vary: a number that a word counts, or an id."""
    text, what = piece
    if what == "?":
        return not is_path and any(char.isdigit() for char in text) and text.lower() not in vocabulary.SCORES
    return what not in ("split", "verdict", "rank")


def _has_pieces(ids: Sequence[str]) -> bool:
    """Return whether ids have two pieces that vary, of which one can be removed so that ids repeat (rule 23)."""
    pieces = _pieces_of_ids(ids)
    split = [_tokens(text, pieces) for text in ids]
    if len({len(tokens) for tokens in split}) != 1:
        return _have_stems(ids)
    columns = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
    others = ([c for c in columns if c is not one] for one in columns)
    return len(columns) > 1 and any(len(set(zip(*rest, strict=True))) < len(ids) for rest in others)


def _have_stems(ids: Iterable[str]) -> bool:
    """Return whether ids with digits are others with an end, as q1 and q1_2, or have beginnings and ends in common."""
    known, num_ends = set(ids), Counter[str]()
    begins: dict[str, set[str]] = defaultdict(set)
    for text in known:
        for cut in re.finditer(r"[\W_]+", text) if any(char.isdigit() for char in text) else ():
            begin, end = text[: cut.start()], text[cut.end() :]
            num_ends[begin] += bool(end)
            begins[end].add(begin)
    is_longer = any(begin in num_ends for begin in known)
    return is_longer or any(len(b) > 1 and max(num_ends[text] for text in b) > 1 for e, b in begins.items() if e)
