"""Proposals: drafts that were tried, with what each of them gives."""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracestore.errors import TracestoreError, UsageError, escape_unprintable
from tracestore.ingest.execute.claims import is_other, list_files
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.drafts import Draft, Drafter
from tracestore.ingest.propose.leaves import Observation, observe
from tracestore.ingest.propose.proofs import NUMBER_OF_TRACES, PASSES, PROOFS_OF_S
from tracestore.ingest.propose.trials import Outcome, is_padded_by, try_layout
from tracestore.store.format.labels import CORRECT
from tracestore.words import plural

MAX_CANDIDATES = 6
_MAX_TRIES, _MAX_DRAFTS = 24, 400
_MAX_FILES = 400  # traces of files in one pattern that are tried
_MAX_SHOWN, _MAX_LINES = 8, 32
_AXES = re.compile(r" -> [^'\"]*")
# The executor's messages about extents: they show that the axes have another order, which values do not.
_EXTENTS = re.compile(
    r"found (the shape |\d+ (ids|layers|tokens))|attentions: found .* (at [A-Z] \d+|columns), expected"
)
# Those that a file with a row too few causes, too: they show it only of an order that is less usual than one that fits.
_SIZES = re.compile(
    r"\) in one layer, expected|\) at [A-Z] \d+, expected|S\.lengths: found \d+, expected 1 to \d"
    r"|ranges end at (?P<rows>[\d,]+), expected (?P<extent>[\d,]+) rows"
)
# What the executor asks of padding, and the answers of which each makes a candidate.
_ASKS_SIDE = "S.side ="
_PADDINGS: dict[str, list[tuple[Mapping[str, Any], str]]] = {
    "is zero in all layers": [({"S.padding": "zeros"}, "S: tokens that are zero in all layers may be padding")],
    _ASKS_SIDE: [({"S.side": side}, f"S: the padding may be on the {side}") for side in ("right", "left")],
}


@dataclass
class Candidate:
    """A layout that gives traces, what it gives, and what is not proved of it."""

    layout: Layout
    outcome: Outcome
    unproved: list[str]
    left_out: Sequence[str] = ()
    reasons: Sequence[str] = ()

    @property
    def is_proved(self) -> bool:
        """Return whether every axis, id and label is proved and nothing is left over."""
        return not self.unproved and not self.left_out

    def lines(self) -> list[str]:
        """Return the `--field` lines of the layout."""
        found = []
        for name, value in self.layout.to_entries().items():
            values = value if name in ("records", "ignore") else [value]
            found += [f"--field {shlex.quote(escape_unprintable(f'{name} = {_plain(one)}'))}" for one in values]
        return found

    def gives(self) -> str:
        """Return what the layout gives in a line."""
        outcome = self.outcome
        low, high = outcome.num_tokens
        size = "last tokens" if outcome.is_last_token else f"S {low}" + (f" to {high}" if high != low else "")
        at_least = "at least " if outcome.is_partial else ""
        first = escape_unprintable(outcome.first_id, 60)
        return (
            f"N {at_least}{outcome.num_traces:,}, L {outcome.num_layers}, {size}, D {outcome.width}, first id {first}"
        )

    def describe(self) -> list[str]:
        """Return lines with the result, with the rows that are joined in order, and with the axes that are not proved."""
        found = [self.gives()]
        for name, (ones, zeros, count) in self.outcome.counts.items():
            direction = self.layout.rule(name).direction
            meaning = "correct" if direction == CORRECT else "hallucinated"
            meaning += f", of the first {self.outcome.num_traces:,} traces" if self.outcome.is_partial else ""
            if ones + zeros == count:
                found.append(f"{name}: 1 ({meaning}) {ones:,} times, 0 {zeros:,} times")
            else:
                found.append(f"{name}: {plural(count, 'value')}, high: {meaning}")
        found += self.outcome.joins
        found += [f"not proved: {text}" for text in self.unproved]
        found += [f"left out: {text}" for text in [*self.left_out, *self.reasons][:_MAX_SHOWN]]
        return found


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass
class Proposal:
    """The layouts that files may have.

    Attributes
    ----------
    layout : Layout or None
        The layout that is used by itself: the only one, proved, with nothing left over.
    candidates : list of Candidate
        At most six layouts to choose from; the one of `layout` is the first.
    num_more : int
        Candidates that are not among them.
    refusals : list of str
        Why drafts were refused.
    observation : Observation
    """

    observation: Observation
    layout: Layout | None = None
    candidates: list[Candidate] = field(default_factory=list)
    num_more: int = 0
    refusals: list[str] = field(default_factory=list)

    def message(self) -> str:
        """Return the layout, or the text of a refusal: the candidates as lines to paste, or what was found."""
        if self.layout is not None:
            candidate = self.candidates[0]
            return "\n".join(["The files prove this layout:", *_indented(candidate, "")])
        if not self.candidates:
            return "\n".join(self._found())
        count = len(self.candidates)
        head = "Several layouts fit the files." if count > 1 else "The files do not prove this layout."
        text = [f"{head} Add the lines of one of them, if it is right:"]
        for number, candidate in enumerate(self.candidates, 1):
            text += _indented(candidate, f"{number}. ")
        if self.num_more:
            text.append(f"{plural(self.num_more, 'more layout')} would fit, too.")
        return "\n".join(text)

    def refusal(self) -> str:
        """Return why no layout is used by itself, in a line: the reason of an error whose candidates are printed."""
        if self.candidates:
            first = self.candidates[0]
            why = next(iter([*first.unproved, *(f"{text} is left out" for text in first.left_out)]), "several fit")
            count = plural(len(self.candidates) + self.num_more, "layout")
            return f"{count} would fit, and none is proved ({why}); --field lines choose one, tracestore inspect prints them"
        why = self.refusals[0] if self.refusals else "no array is named as hidden states"
        return f"no layout fits: {why}; tracestore inspect prints the arrays, --field lines name them"

    def to_toml(self) -> str:
        """Return the layout as TOML; candidates are comments, of which one is to be chosen, and so is what was found."""
        if self.layout is not None:
            return self.layout.to_toml()
        lines = [] if self.candidates else self._found()
        for number, candidate in enumerate(self.candidates, 1):
            lines.append(f"Candidate {number}: remove the mark # before its lines, if it is right.")
            lines += [*candidate.describe(), "", *candidate.layout.to_toml().splitlines(), ""]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)

    def tree(self) -> list[str]:
        """Return the places of values with their extents as lines."""
        kinds = {"f": "floats", "i": "integers", "b": "booleans", "s": "text", "v": "bits"}
        lines = []
        for leaf in self.observation.leaves:
            shapes = dict.fromkeys("×".join("?" if n is None else str(n) for n in spot.dims) for spot in leaf.spots)
            extents = ", ".join(list(shapes)[:3]) + ", ..." * (len(shapes) > 3)
            lines.append(f"{escape_unprintable(str(leaf), 120)}: {kinds[leaf.kind]} {extents}".rstrip())
        unread = self.observation.unread.items()
        return [*lines, *(f"{escape_unprintable(name, 60)}: not read: {why}" for name, why in unread)]

    def _found(self) -> list[str]:
        lines = self.tree()
        shown = lines[:_MAX_LINES]
        text = ["No layout fits the files. They hold:", *(f"  {line}" for line in shown)]
        if len(lines) > len(shown):
            text.append(f"  and {len(lines) - len(shown)} more places")
        for reason in list(dict.fromkeys(self.refusals))[:3]:
            text.append(f"A layout was refused: {reason}")
        if not self.refusals:
            text.append(
                "No array of floating-point numbers is named as hidden states; a line for hidden_states names it."
            )
        return text


def _indented(candidate: Candidate, mark: str) -> list[str]:
    first, *rest = candidate.describe()
    return [f"{mark}{first}", *(f"   {line}" for line in rest), *(f"     {line}" for line in candidate.lines())]


def propose_folder(arguments: list[Path], store: Path = Path("-")) -> Proposal:
    """Return what files and folders may hold; see `propose`."""
    return propose(list_files(arguments, store))


def propose(files: Mapping[str, Path], settings: Mapping[str, Any] | None = None) -> Proposal:
    """Return the layouts that files may have: one that is used by itself, or candidates.

    Parameters
    ----------
    files : Mapping
        Paths by their names below SRC.
    settings : Mapping, optional
        What is known of the axes.
    """
    observation = observe({name: path for name, path in files.items() if not is_other(name)})
    proposal = Proposal(observation)
    layouts: dict[str, tuple[Layout, Draft]] = {}
    for number, draft in enumerate(Drafter(observation).drafts()):
        if number == _MAX_DRAFTS:
            proposal.num_more += 1
            break
        try:
            layout = parse_layout({**draft.entries, **(settings or {})}, "proposal")
        except UsageError as error:
            proposal.refusals.append(str(error))
            continue
        layouts.setdefault(layout.to_toml(), (layout, draft))
    some = _some(files, observation)
    # Those that explain most come first. Padding is stated only where no layout fits without a statement.
    ordered = sorted(layouts.values(), key=lambda pair: len(pair[1].left_out))
    asked = _try(proposal, ordered, some, is_partial=len(some) < len(files))
    if not proposal.candidates:
        _try(proposal, asked, some, is_partial=len(some) < len(files))
    _choose(proposal)
    return proposal


def _some(files: Mapping[str, Path], observation: Observation) -> dict[str, Path]:
    """Return the files of the first traces: where many have one pattern, all with the same ids."""
    left_out: set[str] = set()
    for (_, path), family in observation.families.items():
        if path or len(family.members) <= _MAX_FILES:
            continue
        kept: set[tuple[str, ...]] = set()
        for name, bound in family.members.items():
            key = tuple(value for word, value in bound.items() if word not in AXIS_NAMES)
            if len(kept) < _MAX_FILES:
                kept.add(key)
            if key not in kept:
                left_out.add(name)
    return {name: path for name, path in files.items() if name not in left_out}


def _try(
    proposal: Proposal, pairs: Sequence[tuple[Layout, Draft]], files: Mapping[str, Path], *, is_partial: bool
) -> list[tuple[Layout, Draft]]:
    """Add the candidates among layouts; return refused ones with each statement about padding that they lack.

    A layout that leaves out more than one that fits is none.
    """
    asked, found = list[tuple[Layout, Draft]](), list[tuple[Candidate, Draft]]()
    refused: dict[str, list[tuple[int, str]]] = defaultdict(list)  # by the lines without the order of their axes
    tries = 0
    for layout, draft in pairs:
        if any(set(other.left_out) < set(draft.left_out) for other, _ in found):
            continue
        tries += 1
        if tries > _MAX_TRIES:
            proposal.num_more += 1
            continue
        try:
            outcome = try_layout(layout, files, is_partial=is_partial)
        except TracestoreError as error:
            proposal.refusals.append(str(error))
            asked += _with_padding(layout, draft, str(error))
            if not _EXTENTS.search(str(error)):
                refused[_in_any_order(draft)].append((draft.cost, str(error)))
            continue
        found.append(
            (Candidate(layout, outcome, _not_shown(layout, draft, outcome), draft.left_out, draft.reasons), draft)
        )
    for candidate, draft in _without_refuted(_without_copies(found), files):
        refusals = [text for cost, text in refused[_in_any_order(draft)] if _may_be_meant(text, cost, draft, candidate)]
        if refusals:
            candidate.unproved.append(f"the axes may have another order, which is refused: {refusals[0]}")
        proposal.candidates.append(candidate)
    return asked


def _not_shown(layout: Layout, draft: Draft, outcome: Outcome) -> list[str]:
    """Return what neither the structure of the files nor the values of the traces prove."""
    low, high = outcome.num_tokens
    has_lengths = low != high and outcome.has_whole_rows and "S.mask" in layout.addresses
    shown = {PASSES} if outcome.has_passes else set[str]()
    shown |= {NUMBER_OF_TRACES} if has_lengths else set()
    unproved = [text for text in draft.unproved if text not in shown]
    if outcome.has_gaps:
        unproved.append("L: tokens are zero in some layers alone: texts of several lengths, or files that lack an end")
    if outcome.first_id.isdecimal() and any(" without a " in line for line in outcome.joins):
        unproved.append("integers are the ids of tables with other rows")
    has_passes = any("P" in (address.axes or ()) for address in layout.addresses[layout.states])
    if has_passes and not outcome.has_last_ids:
        unproved.append("tokens: the last id of generate() has no states and does not repeat: ids may be padding")
    return unproved


def _may_be_meant(refusal: str, cost: int, draft: Draft, candidate: Candidate) -> bool:
    """Return whether a refused order of the axes may be meant, in files that are damaged."""
    if _ASKS_SIDE in refusal and _shows_side(candidate):
        return False
    sizes = _SIZES.search(refusal)
    # Without another array that has S, a layer that lost a token makes traces of it, in the other order.
    if sizes is None or cost < draft.cost or not PROOFS_OF_S & candidate.layout.addresses.keys():
        return True
    if cost > draft.cost:
        return False
    rows, extent = (int((sizes[name] or "0").replace(",", "")) for name in ("rows", "extent"))
    return not rows or rows <= 2 * extent <= 4 * rows


def _without_copies(found: list[tuple[Candidate, Draft]]) -> list[tuple[Candidate, Draft]]:
    """Return one of candidates that give equal values: with N or 1 for an axis of one, with files in order or by name."""
    best: dict[tuple[str, bytes], tuple[Candidate, Draft]] = {}
    for number, (candidate, draft) in enumerate(found):
        text = str({k: _AXES.sub(lambda axes: axes[0].replace("N", "1"), str(v)) for k, v in draft.entries.items()})
        text = text.replace("{chunk}", "{n}") if "question_id" in draft.entries else text
        digest = str(number).encode() if candidate.outcome.is_partial else candidate.outcome.digest
        pair = best.get((text, digest), (candidate, draft))
        best[text, digest] = min(pair, (candidate, draft), key=lambda pair: _doubts(pair[0]))
    return list(best.values())


def _doubts(candidate: Candidate) -> int:
    return len(candidate.unproved) + len(candidate.left_out)


def _without_refuted(found: list[tuple[Candidate, Draft]], files: Mapping[str, Path]) -> list[tuple[Candidate, Draft]]:
    """Return candidates without those whose padding contradicts the order of their axes, where it proves another one.

    Under a mask with rows of different lengths, only one order of the axes leaves whole rows of attention, and zeros
    where the mask leaves tokens out.
    """
    orders: dict[str, list[Candidate]] = defaultdict(list)
    for candidate, draft in found:
        orders[_in_any_order(draft)].append(candidate)
    shown = {
        id(candidate): _shown_orders(candidate, files)
        for candidates in orders.values()
        for candidate in candidates
        if len(candidates) > 1
    }
    return [
        (candidate, draft)
        for candidate, draft in found
        if not any(
            _refutes(other, candidate, shown) for other in orders[_in_any_order(draft)] if other is not candidate
        )
    ]


def _shown_orders(candidate: Candidate, files: Mapping[str, Path]) -> set[str]:
    """Return the fields whose order of axes the padding shows."""
    layout, outcome = candidate.layout, candidate.outcome
    is_padded = {"S.mask", "S.lengths"} & layout.addresses.keys() and outcome.num_tokens[0] != outcome.num_tokens[1]
    found = {"attentions"} if is_padded and outcome.has_whole_rows else set[str]()
    return found | ({layout.states} if is_padded_by(layout, outcome, files) else set())


def _refutes(one: Candidate, other: Candidate, shown: Mapping[int, set[str]]) -> bool:
    """Return whether the values show each order of axes in which a candidate differs from another one, and none of its."""
    lines, others = one.layout.to_entries(), other.layout.to_entries()
    differing = {name for name in lines if lines[name] != others.get(name)}
    return bool(differing) and differing <= shown[id(one)] and not differing & shown[id(other)]


def _shows_side(candidate: Candidate) -> bool:
    """Return whether lengths that differ leave out zeros, NaN or one token id, at the end that no entry states."""
    low, high = candidate.outcome.num_tokens
    return low != high and "S.lengths" in candidate.layout.addresses and "S.side" not in candidate.layout.settings


def _in_any_order(draft: Draft) -> str:
    """Return the lines of a draft without the order of their axes: of two that fit the extents, values refuse one."""
    return str({k: _AXES.sub(lambda axes: "".join(sorted(axes[0])), str(v)) for k, v in draft.entries.items()})


def _with_padding(layout: Layout, draft: Draft, refusal: str) -> list[tuple[Layout, Draft]]:
    """Return a refused layout with each answer to what the executor asks of padding."""
    answers = [answer for words, found in _PADDINGS.items() if words in refusal for answer in found]
    return [
        (replace(layout, settings=settings), replace(draft, unproved=[*draft.unproved, doubt]))
        for settings, doubt in answers
    ]


def _choose(proposal: Proposal) -> None:
    """Use the only candidate if it is proved; keep at most six."""
    found = proposal.candidates
    if len(found) == 1 and not proposal.num_more and found[0].is_proved:
        proposal.layout = found[0].layout
        return
    found.sort(key=lambda c: len(c.unproved))
    proposal.num_more += max(len(found) - MAX_CANDIDATES, 0)
    del found[MAX_CANDIDATES:]
