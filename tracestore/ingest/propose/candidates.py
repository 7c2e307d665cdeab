"""Candidates: drafts that were tried, in words; and which of several the values of the traces leave."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracestore.errors import escape_unprintable
from tracestore.ingest.execute.arrays import IS_MASKED
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.propose.drafts import Draft
from tracestore.ingest.propose.proofs import NUMBER_OF_TRACES, OF_TEXT, PADDED_PROMPTS, PADDING, PASSES, PROOFS_OF_S
from tracestore.ingest.propose.trials import Outcome, counts_no_padding, is_padded_by
from tracestore.store.format.labels import CORRECT
from tracestore.words import plural

_MAX_SHOWN = 8
_AXES = re.compile(r" -> [^'\"]*")
# The executor's messages about extents: they show that the axes have another order, which values do not.
_EXTENTS = re.compile(
    r"found (the shape |\d+ (ids|layers|tokens))|attentions: found .* (at [A-Z] \d+|columns), expected"
)
# Those that a file with a row too few causes, too: they show it only of an order that is less usual than one that fits.
_SIZES = re.compile(
    r"\) in one layer, expected|\) at [A-Z] \d+, expected|S\.lengths: found \d+, expected 1 to \d"
    r"|ranges end at [\d,]+, expected|the trace has no id where|\d rows belong to \d"
)
# What the executor asks of padding.
_ASKS_SIDE = "S.side ="
Refused = Mapping[str, Sequence[tuple[int, str]]]  # costs and reasons of drafts, by `in_any_order`


@dataclass
class Candidate:
    """A layout that gives traces, what it gives, and what is not proved of it."""

    draft: Draft
    outcome: Outcome

    def __post_init__(self) -> None:
        self.layout, self.left_out = self.draft.layout, self.draft.left_out
        self.unproved = _not_shown(self.layout, self.draft, self.outcome)

    @property
    def is_proved(self) -> bool:
        """Return whether every axis, id and label is proved and nothing is left over."""
        return not self.unproved and not self.left_out

    def lines(self) -> Iterator[str]:
        """Yield the `--field` lines of the layout."""
        return self.layout.flags()

    def gives(self) -> str:
        """Return what the layout gives in a line."""
        outcome = self.outcome
        low, high = outcome.num_tokens
        size = "last tokens" if outcome.is_last_token else f"S {low}" + (f" to {high}" if outcome.varies else "")
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
        return found + [f"left out: {text}" for text in [*self.left_out, *self.draft.reasons][:_MAX_SHOWN]]


def _not_shown(layout: Layout, draft: Draft, outcome: Outcome) -> list[str]:
    """Return what neither the structure of the files nor the values of the traces prove."""
    shown = {PASSES} if outcome.has_passes else set[str]()
    if outcome.varies and outcome.has_whole_rows and "S.mask" in layout.addresses:
        shown.add(NUMBER_OF_TRACES)
    unproved = [text for text in draft.unproved if text not in shown]
    has_passes = any("P" in (address.axes or ()) for address in layout.addresses[layout.states])
    may_end_padded = has_passes and not outcome.has_last_ids
    is_of_others = outcome.first_id.isdecimal() and any(" without a " in line for line in outcome.joins)
    moved = ", ".join(outcome.moved)
    doubts = {
        PADDING: outcome.may_be_padded,
        "L: tokens are zero in some layers alone: texts of several lengths, or files that lack an end": outcome.has_gaps,
        "N: two traces have equal states, as a copy in another file or place has them": outcome.has_copies,
        "integers are the ids of tables with other rows": is_of_others,
        f"{moved}: joined in order, and the ids may number rows in another order": bool(moved),
        OF_TEXT: outcome.counts_text,
        "tokens: the last id of generate() has no states and does not repeat: ids may be padding": may_end_padded,
    }
    return [*unproved, *(text for text, is_doubtful in doubts.items() if is_doubtful and text not in unproved)]


def chosen(found: list[Candidate], refused: Refused, files: Mapping[str, Path]) -> list[Candidate]:
    """Return the candidates that give different values, and that those of the others do not refute.

    Parameters
    ----------
    found : list of Candidate
    refused : Mapping
        Costs and reasons of the drafts that the executor refused, by their lines without the order of their axes.
    files : Mapping
        Paths by their names below SRC.
    """
    left = _without_refuted(_without_copies(found), files)
    for candidate in left:
        if PADDED_PROMPTS in candidate.unproved and counts_no_padding(candidate.layout, candidate.outcome, files):
            candidate.unproved.remove(PADDED_PROMPTS)
        reasons = refused.get(in_any_order(candidate.draft), ())
        meant = [text for cost, text in reasons if _may_be_meant(text, cost, candidate)]
        if meant:
            candidate.unproved.append(f"the axes may have another order, which is refused: {meant[0]}")
    return left


def in_any_order(draft: Draft) -> str:
    """Return the lines of a draft without the order of their axes: of two that fit the extents, values refuse one."""
    return str({k: _AXES.sub(lambda axes: "".join(sorted(axes[0])), str(v)) for k, v in draft.entries.items()})


def _without_copies(found: list[Candidate]) -> list[Candidate]:
    """Return one of candidates that give all traces the same ids and values, by one order of the axes: N or 1 is one.

    Files in order or by name, and tables joined by one column or another, say the same there.
    """
    best: dict[tuple[str, bytes], Candidate] = {}
    for number, candidate in enumerate(found):
        entries = {k: v for k, v in candidate.draft.entries.items() if k != "ignore"}
        own = {k: _AXES.findall(v) if isinstance(v, str) else v for k, v in entries.items()}
        text = str({k: v for k, v in own.items() if v != []}).replace("N", "1")
        digest = str(number).encode() if candidate.outcome.is_partial else candidate.outcome.digest
        rivals = best.get((text, digest), candidate), candidate
        best[text, digest] = min(rivals, key=lambda one: len(one.unproved) + len(one.left_out))
    return list(best.values())


def _without_refuted(found: list[Candidate], files: Mapping[str, Path]) -> list[Candidate]:
    """Return candidates without those whose padding contradicts the order of their axes, where it proves another one.

    Under a mask with rows of different lengths, only one order of the axes leaves whole rows of attention, and zeros
    where the mask leaves tokens out.
    """
    orders = [in_any_order(candidate.draft) for candidate in found]
    shown = [
        _shown_orders(one, files) if orders.count(own) > 1 else set[str]()
        for one, own in zip(found, orders, strict=True)
    ]
    rivals = list(zip(orders, found, shown, strict=True))
    return [
        one
        for order, one, own in rivals
        if not any(its == order and _refutes(other, shows, one, own) for its, other, shows in rivals)
    ]


def _shown_orders(candidate: Candidate, files: Mapping[str, Path]) -> set[str]:
    """Return the fields whose order of axes the padding shows."""
    is_shown = is_padded_by(candidate.layout, candidate.outcome, files)
    return _padded_fields(candidate) | ({candidate.layout.states} if is_shown else set())


def _padded_fields(candidate: Candidate) -> set[str]:
    """Return "attentions" if a mask or lengths that differ leave whole rows of it."""
    is_padded = candidate.outcome.varies and not {"S.mask", "S.lengths"}.isdisjoint(candidate.layout.addresses)
    return {"attentions"} if is_padded and candidate.outcome.has_whole_rows else set()


def _refutes(one: Candidate, shown: set[str], other: Candidate, its: set[str]) -> bool:
    """Return whether the values show each order of axes in which a candidate differs from another one, and none of its."""
    lines, others = one.layout.to_entries(), other.layout.to_entries()
    differing = {name for name in lines if lines[name] != others.get(name)}
    return bool(differing) and differing <= shown and not differing & its


def _may_be_meant(refusal: str, cost: int, candidate: Candidate) -> bool:
    """Return whether a refused order of the axes may be meant, in files that are damaged."""
    if _EXTENTS.search(refusal):
        return False
    lines = candidate.layout.addresses
    if IS_MASKED in refusal and "attentions" in _padded_fields(candidate):
        return False
    # Lengths that differ leave out zeros, NaN or one token id, at the end that no entry states.
    if _ASKS_SIDE in refusal and candidate.outcome.varies and "S.lengths" in lines:
        return False
    # Without another array that has S, a layer that lost a token makes traces of it, in the other order.
    is_of_sizes = _SIZES.search(refusal) is not None and not PROOFS_OF_S.isdisjoint(lines)
    return cost <= candidate.draft.cost or not is_of_sizes
