"""The places of a layout: its addresses with their axes, and what joins each of them to the states."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from tracestore.errors import UsageError
from tracestore.ingest.layout.addresses import Address, ItemsStep, KeyStep, Step
from tracestore.ingest.layout.fields import KEEP, KEY, RECORD_FIELDS, STATES, FieldRule, score_of
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.layout.patterns import AXIS_NAMES, INNER_NAMES, VALUE, Pattern

# Axes along which others lie behind each other.
_FLAT = ("NS", "NK", "KN", "LD", "SD")
# Names of what may bind the order of rows but says that the order is another one (rule 13a).
_RANK = re.compile(r"(rank|gpu|proc|process|worker)[-_]?\d", re.IGNORECASE)
_NO_ORDER = re.compile(r"(rank|gpu|proc|process|worker|shard_of)[-_]?(\\\{|\{)?chunk", re.IGNORECASE)
_WILD = re.compile(r"(?<!\\)\*+/?")
_NAME = re.compile(r"(?<!\\)\{")
# Fields that bind a name by their value, so that later fields are joined over it.
DERIVED = {"question_id": "id", "sample": "sample"}
_TEXT_NAMES = ("question", "generated_answer", "generated_answer_clean", "generated_text")
RECORDS = "records"


@dataclass(frozen=True, eq=False)  # a key of many dicts: its hash takes no time
class Place:
    """One address of a field.

    Attributes
    ----------
    name : str
        The field, or "records".
    address : Address
    rule : FieldRule
    axes : tuple of str
        The axes of a value; the second S of attention is "Q".
    part : int
        0, or 1 for the answer behind the prompt.
    is_optional : bool
        Whether a key of `records` gives the field, which may lack it.
    """

    name: str
    address: Address
    rule: FieldRule
    axes: tuple[str, ...]
    part: int = 0
    is_optional: bool = False

    @cached_property
    def wild(self) -> frozenset[str]:
        """The wildcards of files and path, each named by the text up to it."""
        keys = ((prefix, step.text) for prefix, step in self.steps() if isinstance(step, KeyStep))
        wild = (f"{prefix}/{text}" for prefix, text in keys if _WILD.search(text))
        return frozenset(f"*{text}" for text in (*wild_prefixes(self.address.files.text), *wild))

    @cached_property
    def crossed(self) -> frozenset[str]:
        """The wildcards of files across which the parts of a trace may lie: its keys are complete."""
        names = {name for step in self.address.path for name in step.names}
        is_cut = bool(names & set(AXIS_NAMES)) and bool(names - set(AXIS_NAMES))
        return frozenset(f"*{prefix}" for prefix in wild_prefixes(self.address.files.text) if is_cut)

    @cached_property
    def file_names(self) -> list[str]:
        """The names and wildcards of its files that tell traces apart."""
        files = self.address.files
        return [*(n for n in files.names if n not in AXIS_NAMES), *(f"*{p}" for p in wild_prefixes(files.text))]

    def steps(self) -> Iterable[tuple[str, object]]:
        """Yield each step of the path with the text before it."""
        prefix = f"{self.address.files.text} : "
        for step in self.address.path:
            yield prefix, step
            prefix += step.text + "/"

    @cached_property
    def trace_names(self) -> frozenset[str]:
        """The names and letters that tell traces apart: without those of axes inside a trace."""
        letters = {letter for axis in self.axes for letter in axis if letter in "NK"}
        names = self.address.bound - INNER_NAMES - ({VALUE} if self.is_said_by_key else set())
        # A name with a dot is the end of a range.
        return frozenset({name for name in names if "." not in name} | letters)

    @cached_property
    def is_said_by_key(self) -> bool:
        """Return whether a key {value} is the value of the ids in its list: `{value}/[id=]`."""
        *keys, last = self.address.path or (None,)
        names = {name for step in keys if isinstance(step, KeyStep) for name in step.names}
        return VALUE in names and isinstance(last, ItemsStep) and last.columns == {""}

    @property
    def is_of_answer(self) -> bool:
        """True if its values are those of the tokens from prompt_length on."""
        return "G" in (self.address.axes or ())

    @cached_property
    def numbered(self) -> set[str]:
        """The names that items bind by their own number: "sample" among those of one id, others among all."""
        steps = [step for step in self.address.path if isinstance(step, ItemsStep)]
        return {v.name for step in steps for v in step.values if v.path == ("#",)}

    @cached_property
    def position_prefix(self) -> str | None:
        """The text before the items by position that bind N; None if N is an axis, or nothing binds it."""
        steps = self.steps()
        return next((text for text, step in steps if isinstance(step, ItemsStep) and step.letter == "N"), None)


def wild_prefixes(text: str) -> list[str]:
    """Return the texts up to each wildcard of FILES."""
    return [text[: match.end()] for match in _WILD.finditer(text)]


@dataclass
class Plan:
    """The resolved layout: places, the names of a trace, and how each place is joined.

    Attributes
    ----------
    layout : Layout
    states : list of Place
        Where the states lie: one place, or those of prompt and answer.
    others : list of Place
        Every other place, those that bind names for later ones first.
    names : frozenset of str
        What the states bind for each trace.
    of_answers : frozenset of str
        Those that only the answers bind, which then share their prompt: "sample" or "K".
    keys : dict
        By place: the names that join it to a trace.
    ignored : dict
        By entry of `ignore`: the same places as the lines spell them.
    """

    layout: Layout
    states: list[Place] = field(default_factory=list)
    others: list[Place] = field(default_factory=list)
    ignored: dict[Address, list[Address]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    of_answers: frozenset[str] = frozenset()
    wild: frozenset[str] = frozenset()
    keys: dict[Place, tuple[str, ...]] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """All places."""
        return [*self.states, *self.others]

    @cached_property
    def files(self) -> dict[str, Pattern]:
        """The different FILES of the layout, in their order."""
        texts = [place.address.files.text for place in self.places]
        return {text: Pattern(text, is_path=True) for text in [*texts, *(a.files.text for a in self.left_out)]}

    @cached_property
    def ignored_files(self) -> set[str]:
        """The FILES that no line has."""
        return self.files.keys() - {place.address.files.text for place in self.places}

    @cached_property
    def source_names(self) -> list[str]:
        """The names in the files of the states that tell sources apart."""
        return [name for name in self.states[0].file_names if name not in self.states[0].crossed]

    @cached_property
    def names_in_file(self) -> list[str]:
        """The names and letters that tell the questions of a file apart: their positions, and what keys bind."""
        first = self.states[0]
        return sorted((self.names | self.wild) - {*first.address.files.names, *first.file_names, "K", "sample"})

    def shared_names(self, place: Place) -> list[str]:
        """Return the names that say to which sources a file of a place belongs."""
        return [name for name in self.source_names if name in place.file_names and "." not in name]

    @cached_property
    def scores(self) -> set[str]:
        """The names of the scores whose direction is known."""
        return {score_of(name) for name in self.layout.known_directions() if name != "label"}

    @property
    def left_out(self) -> list[Address]:
        """The places that `ignore` leaves out."""
        return [address for found in self.ignored.values() for address in found]

    @property
    def kept_names(self) -> frozenset[str]:
        """The names whose values keep rows and traces."""
        return frozenset(n.removeprefix(KEEP) for n in self.layout.settings if n.startswith(KEEP))

    @property
    def is_of_answer(self) -> bool:
        """Return whether the states are those of the tokens from prompt_length on."""
        return len(self.states) == 1 and self.states[0].is_of_answer

    @property
    def is_global(self) -> bool:
        """Return whether rows of the states run on over several chunks."""
        return "chunk" in self.names


def plan_of(layout: Layout) -> Plan:
    """Return the plan of a layout; UsageError if nothing joins a field to the states."""
    plan = Plan(layout)
    for name, addresses in layout.addresses.items():
        for part, address in enumerate(addresses):
            place = _place(layout, name, address, part)
            (plan.states if name == layout.states else plan.others).append(place)
    _add_records(plan)
    plan.ignored = {address: _as_in_lines(address, plan.places) for address in layout.ignore}
    plan.others = [place for place in plan.others if not (place.is_optional and place.address in plan.left_out)]
    if layout.addresses.keys() >= {*STATES}:
        raise UsageError(
            "last_token: stated in addition to hidden_states; convert with two layouts, one after the other"
        )
    for place in plan.places:
        if _NO_ORDER.search(str(place.address)):
            raise UsageError(
                f"{place.name}: {place.address.files.text}: files of ranks are no chunks in order; write * or {{rank}}"
            )
    if len(plan.states) > 1 and any(_RANK.search(place.address.files.text) for place in plan.states):
        raise UsageError(f"{layout.states}: files of ranks are no prompt and answer, whose tokens two addresses join")
    # Answers with one prompt.
    prompt, answer = plan.states[0], plan.states[-1]
    extra = answer.trace_names - prompt.trace_names
    if prompt.trace_names < answer.trace_names and extra <= {"sample", "K"}:
        plan.of_answers = extra & answer.address.bound
    plan.names = frozenset.intersection(*(place.trace_names for place in plan.states)) | plan.of_answers
    plan.wild = frozenset.intersection(*(place.wild for place in plan.states)) - plan.states[0].crossed
    for place in plan.states:
        if extra := place.trace_names - plan.names - {"N", "K"}:
            raise UsageError(
                f"{place.name}: only one of its addresses binds {', '.join(sorted(extra))}; prompt and answer are two "
                "parts of one trace, whose tokens {token} or {step} numbers"
            )
    _join(plan)
    return plan


def _as_in_lines(entry: Address, places: Iterable[Place]) -> list[Address]:
    """Return the places that an entry of `ignore` names, with the FILES and steps of the lines that lead there."""
    paths: dict[Pattern, list[tuple[Step, ...]]] = {}
    for place in places:
        if entry.path and _covers(entry.files, place.address.files):
            paths.setdefault(place.address.files, []).append(place.address.path)
    found = []
    for files, known in (paths or {entry.files: []}).items():
        ways: list[tuple[Step, ...]] = [()]
        for step in entry.path[:-1]:
            ways = [(*way, other) for way in ways for other in _like(step, way, known)]
        found += [Address(files, (*way, *entry.path[-1:])) for way in ways]
    return found


def _like(step: Step, way: tuple[Step, ...], known: list[tuple[Step, ...]]) -> list[Step]:
    """Return the steps of lines behind a way that lead where a step of an entry does, and the step if none is as wide."""
    following = dict.fromkeys(path[len(way)] for path in known if path[: len(way)] == way and len(path) > len(way))
    if isinstance(step, ItemsStep):
        return [other for other in following if isinstance(other, ItemsStep)] or [step]
    if not isinstance(step, KeyStep) or len(step.parts) > 1:
        return [step]
    single = [other for other in following if isinstance(other, KeyStep) and len(other.parts) == 1]
    like: list[Step] = [other for other in single if _covers(step.parts[0], other.parts[0])]
    is_wide = any(other.parts[0].num_literals == step.parts[0].num_literals for other in single if other in like)
    return like if is_wide else [*like, step]


def _covers(pattern: Pattern, other: Pattern) -> bool:
    """Return whether a pattern is another one, or is it with wildcards that match names of it."""
    wild = Pattern(_NAME.sub(r"\\{", pattern.text), pattern.is_path)  # its own names match themselves alone
    return pattern == other or ("**" not in other.text and wild.match(other.text) is not None)


def _place(layout: Layout, name: str, address: Address, part: int = 0, *, is_optional: bool = False) -> Place:
    rule = layout.rule(name)
    axes = address.axes_of(rule.axes)
    is_open = name.startswith(("S.offsets", "S.owner", "shape.")) and len(layout.addresses[name]) == 1
    if is_open and address.axes is None:
        axes = ("V",)  # any number of values
    if unknown := [axis for axis in axes if len(axis) > 1 and axis not in _FLAT]:
        raise UsageError(
            f"{name}: {address}: found ({' '.join(unknown[0])}), expected (N S), (N K), (K N), (L D) or (S D); "
            f"shape.{layout.states} gives the shape of flat numbers"
        )
    if name == STATES[0]:  # their tokens are the axis S, also if they begin at prompt_length
        axes = tuple("S" if axis == "G" else axis for axis in axes)
    if axes.count("S") == 2:
        second = len(axes) - 1 - axes[::-1].index("S")
        axes = (*axes[:second], "Q", *axes[second + 1 :])
    if any(axes.count(axis) > 1 for axis in axes if axis != "1"):
        raise UsageError(f"{name}: {address}: an axis occurs twice")
    if name == "attentions" and "S" in address.bound | {AXIS_NAMES.get(n, "") for n in address.bound} and "S" in axes:
        axes = tuple("Q" if axis == "S" else axis for axis in axes)
    return Place(name, address, rule, axes, part, is_optional)


def _add_records(plan: Plan) -> None:
    """Add the places of `records`: each item for its extras, and each key that is the name of a field.

    A text or list of spans may also have a line of its own: of two values that differ, neither is stored.
    """
    layout = plan.layout
    for record in layout.records:
        plan.others.append(Place(RECORDS, record, FieldRule("json"), ()))
        for name in RECORD_FIELDS:
            if name in layout.templates or name in STATES:
                continue
            address, stated = record.below(name), layout.addresses.get(name, ())
            is_second = layout.rule(name).kind in ("text", "json") and address not in (*stated, *layout.ignore)
            if not stated or is_second:
                plan.others.append(_place(layout, name, address, is_optional=True))


def _join(plan: Plan) -> None:
    """Set the names that join each place; order the places so that what binds a name comes before its use."""
    layout = plan.layout
    made = {DERIVED.get(name, name) for name in {"id", *DERIVED} & {*layout.templates, *layout.settings}}
    known = {*plan.names, "file", *made}
    known |= ({"chunk"} if plan.is_global else set()) | ({"sample"} if "K" in plan.names else set())
    waiting, plan.others = plan.others, []
    while waiting:
        ready = [p for p in waiting if _is_joined(plan, p, known)]
        # A place waits for those that give what it binds, unless nothing else is left.
        ready = [p for p in ready if not _waits(p, waiting, known)] or ready
        first = [p for p in ready if given_name(p)] or ready
        if not first:
            place = waiting[0]
            bound = ", ".join(sorted(place.trace_names))
            raise UsageError(
                f"{place.name}: {place.address}: nothing joins it: it binds {bound}, "
                f"and {layout.states} {', '.join(sorted(plan.names)) or 'no name'}{_advice(plan, place)}"
            )
        for place in first:
            plan.keys[place] = _key(plan, place, known)
        plan.others += first
        waiting = [p for p in waiting if p not in first]
        known |= {name for place in first if (name := given_name(place))}


def given_name(place: Place) -> str | None:
    """Return the name that the values of a place bind for other places."""
    if place.name.startswith(KEY):
        return place.name.removeprefix(KEY)
    return DERIVED.get(place.name, place.name if place.name in _TEXT_NAMES else None)


def _advice(plan: Plan, place: Place) -> str:
    """Return how a place that nothing joins may be joined."""
    if "question_id" in place.trace_names:
        return "; id is what question_id gives"
    if "sample" in place.trace_names:
        return "; a line for sample states what tells the answers of the states apart"
    if place.trace_names == {"N"}:
        other = "{id} as in the states, or [id=COLUMN]" if "id" in plan.names else "[NAME=COLUMN]"
        return f"; rows in order need states in order; {other} joins by what rows say"
    if name := min((name for name in plan.names if name not in ("N", "K")), default=None):
        return f'; [{name}=COLUMN] joins it, and [COLUMN="TEXT{{{name}}}"] if the column spells it otherwise'
    return ""


def _waits(place: Place, waiting: list[Place], known: set[str]) -> bool:
    """Return whether a place binds a name whose value another waiting place gives."""
    unknown = place.trace_names - known
    return bool(unknown) and not unknown.isdisjoint(given_name(p) for p in waiting if p is not place)


def _key(plan: Plan, place: Place, known: set[str]) -> tuple[str, ...]:
    names = place.trace_names & known
    if "N" in names and plan.is_global and "chunk" not in place.trace_names:
        names = (names - {"N"}) | {"N*"}  # the table runs on over the chunks
    return (*sorted(names), *sorted(place.wild & plan.wild))


def _is_joined(plan: Plan, place: Place, known: set[str]) -> bool:
    return not place.trace_names or bool(_key(plan, place, known)) or not (plan.names or plan.wild)
