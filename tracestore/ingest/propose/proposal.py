"""Proposals: the layouts that files may have, one that is used by itself or candidates to choose from."""

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, TracestoreError, escape_unprintable
from tracestore.ingest.execute.claims import is_other
from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.layout.language import Layout, field_line
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.candidates import Candidate, chosen, in_any_order
from tracestore.ingest.propose.drafts import UNSHOWN, Draft, Drafter
from tracestore.ingest.propose.leaves import Observation, observe
from tracestore.ingest.propose.trials import try_layout
from tracestore.words import plural

MAX_CANDIDATES = 6
_MAX_TRIES, _MAX_DRAFTS = 24, 400
_MAX_FILES = 400  # traces of files in one pattern that are tried
_MAX_LINES = 32
# Entries that messages of the executor ask for, and their values if these are not in the message.
_ASKED = re.compile(r"(S\.pad) = (\[-?\d+, -?\d+\])|(S\.prompt) = ")
_COUNTED = ('"tokens"', '"columns"')
_BASE64 = re.compile(r"(?:[\w+/]{4}){32,}[\w+/=]{4}\Z", re.ASCII)  # longer than a digest
_KINDS = {"f": "floats", "i": "integers", "b": "booleans", "s": "text", "v": "bits"}


@dataclass
class Proposal:
    """The layouts that files may have.

    Attributes
    ----------
    observation : Observation
    candidates : list of Candidate
        At most six layouts to choose from, the proved ones first.
    num_more : int
        Candidates that are not among them.
    refusals : list of str
        Why drafts were refused.
    """

    observation: Observation
    candidates: list[Candidate] = field(default_factory=list)
    num_more: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def layout(self) -> Layout | None:
        """The layout that is used by itself: the only one, proved, with nothing left over."""
        is_only = len(self.candidates) == 1 and not self.num_more
        return self.candidates[0].layout if is_only and self.candidates[0].is_proved else None

    def message(self, *, has_tree: bool = True, ignored: Iterable[str] = ()) -> str:
        """Return the layout, or the text of a refusal: the candidates as lines to paste, or what was found.

        The lines also leave out what is `ignored` without them.
        """
        given = [field_line("ignore", text) for text in ignored]
        return "\n".join(self._described(lambda candidate: [*candidate.lines(), *given], has_tree=has_tree))

    def to_toml(self) -> str:
        """Return the layout as TOML, without one the candidates or what was found as comments."""
        if self.layout is not None:
            return self.layout.to_toml()
        found = self._described(lambda candidate: candidate.layout.to_toml().splitlines())
        return "".join(f"# {line}".rstrip() + "\n" for line in found)

    def _described(self, lines_of: Callable[[Candidate], Iterable[str]], *, has_tree: bool = True) -> list[str]:
        count = len(self.candidates)
        if not count:
            return self._found(has_tree=has_tree)
        head = "Several layouts fit the files." if count > 1 else "The files do not prove this layout."
        text = [f"{head} Add the lines of one of them, if it is right:"]
        if self.layout is not None:
            text = ["The files prove this layout:"]
        for number, candidate in enumerate(self.candidates, 1):
            first, *rest = candidate.describe()
            text.append(first if self.layout is not None else f"{number}. {first}")
            text += [*(f"   {line}" for line in rest), *(f"     {line}" for line in lines_of(candidate))]
        if self.num_more:
            text.append(f"{plural(self.num_more, 'more layout')} would fit, too.")
        return text

    def refusal(self) -> str:
        """Return why no layout is used by itself, in a line: the reason of an error whose candidates are printed."""
        if self.candidates:
            first = self.candidates[0]
            why = next(iter([*first.unproved, *(f"{text} is left out" for text in first.left_out)]), "several fit")
            count = plural(len(self.candidates) + self.num_more, "layout")
            return f"{count} would fit, and none is proved ({why}); --field lines choose one, tracestore inspect prints them"
        unread = [f"{name}: {why}" for name, why in self.observation.unread.items()]
        why = [*self.refusals, *unread, "no array is named as hidden states"][0]
        has_arrays = any(leaf.rank for leaf in self.observation.leaves if leaf.number_kind in "fv")
        way = "; tracestore inspect prints the arrays, --field lines name them" * has_arrays
        return f"no layout fits: {why}{way}"

    def tree(self) -> list[str]:
        """Return the places of values with their extents as lines."""
        lines = []
        for leaf in self.observation.leaves:
            shapes = dict.fromkeys("×".join("?" if n is None else str(n) for n in spot.dims) for spot in leaf.spots)
            extents = ", ".join(list(shapes)[:3]) + ", ..." * (len(shapes) > 3)
            kind = _KINDS[leaf.number_kind] + " as text" * (leaf.number_kind != leaf.kind)
            is_base64 = leaf.scalars and all(_BASE64.match(str(value)) for value in leaf.scalars)
            kind += " (base64: dtype and shape entries read it)" if is_base64 else ""
            lines.append(f"{escape_unprintable(str(leaf))}: {kind} {extents}".rstrip())
        unread = self.observation.unread.items()
        return [*lines, *(f"{escape_unprintable(name, 60)}: not read: {why}" for name, why in unread)]

    def _found(self, *, has_tree: bool) -> list[str]:
        lines = self.tree() if has_tree else []
        text = [f"No layout fits the files.{' They hold:' * has_tree}", *(f"  {line}" for line in lines[:_MAX_LINES])]
        if len(lines) > _MAX_LINES:
            text.append(f"  and {len(lines) - _MAX_LINES} more places")
        reasons = [f"A layout was refused: {reason}" for reason in dict.fromkeys(self.refusals)]
        unnamed = "No array of floating-point numbers is named as hidden states; a line for hidden_states names it."
        return [*text, *(reasons[:3] or [unnamed])]


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
    drafts: dict[str, Draft] = {}
    for number, found in enumerate(Drafter(observation).drafts()):
        if number == _MAX_DRAFTS:
            proposal.num_more += 1
            break
        draft = replace(found, entries=found.entries | dict(settings or {}))
        try:
            drafts.setdefault(draft.layout.to_toml(), draft)
        except TracestoreError as error:
            proposal.refusals.append(str(error))
    # Those that explain most come first: a file that is left out counts more than what is below one.
    ordered = sorted(drafts.values(), key=lambda draft: sum(1 + (" : " not in text) for text in draft.left_out))
    first = _first_files(files, observation)
    candidates = sorted(_tried(proposal, ordered, files, first), key=lambda candidate: len(candidate.unproved))
    proposal.candidates = candidates[:MAX_CANDIDATES]
    proposal.num_more += len(candidates[MAX_CANDIDATES:])
    return proposal


def _first_files(files: Mapping[str, Path], observation: Observation) -> dict[str, Path]:
    """Return the files of the first traces: where many have one pattern, all with the same ids."""
    left_out: set[str] = set()
    for (_, path), family in observation.families.items():
        if path or len(family.members) <= _MAX_FILES:
            continue
        keys = {
            n: tuple(v for word, v in bound.items() if word not in AXIS_NAMES) for n, bound in family.members.items()
        }
        kept = set(list(dict.fromkeys(keys.values()))[:_MAX_FILES])
        left_out |= {name for name, key in keys.items() if key not in kept}
    return {name: path for name, path in files.items() if name not in left_out}


def _with_asked(draft: Draft, refusal: str) -> Iterator[Draft]:
    """Yield a draft with each value of the entry that the reason of its refusal asks for, or without refused flags of prompts.

    None of them is proved.
    """
    for name in (PROMPT_MASK, *["prompt_length"] * (UNSHOWN in draft.unproved)):
        if f" {name}: " in refusal and name in draft.entries:
            address = draft.entries[name].partition(" -> ")[0]
            entries = {n: value for n, value in draft.entries.items() if n != name}
            entries["ignore"] = [*entries.get("ignore", ()), address]
            yield replace(draft, entries=entries, left_out=[*draft.left_out, address])
    for pad, ids, prompt in _ASKED.findall(refusal):
        for value in [ids] if pad else _COUNTED:
            if (name := pad or prompt) not in draft.entries:
                entries, doubt = draft.entries | {name: json.loads(value)}, f"{name}: nothing in the files says {value}"
                yield replace(draft, entries=entries, unproved=[*draft.unproved, doubt])


def _explains_more(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether what one layout leaves out is a part of what another one leaves out."""
    is_part = all(any(text == whole or text.startswith(f"{whole} : ") for whole in other) for text in one)
    return is_part and set(one) != set(other)


def _tried(
    proposal: Proposal, drafts: Iterable[Draft], files: Mapping[str, Path], first: Mapping[str, Path]
) -> list[Candidate]:
    """Return the candidates among drafts.

    A draft that leaves out more than one that fits is none.
    """
    found: list[Candidate] = []
    refused: dict[str, list[tuple[int, str]]] = defaultdict(list)
    tries = 0
    waiting = deque(drafts)
    while waiting:
        draft = waiting.popleft()
        if any(_explains_more(candidate.left_out, draft.left_out) for candidate in found):
            continue
        tries += 1
        if tries > _MAX_TRIES:
            proposal.num_more += 1
            continue
        try:
            if draft.contradiction:
                raise InvalidInputError(draft.contradiction)
            found.append(Candidate(draft, try_layout(draft.layout, first, is_partial=len(first) < len(files))))
        except TracestoreError as error:
            proposal.refusals.append(str(error))
            refused[in_any_order(draft)].append((draft.cost, str(error)))
            waiting.extendleft(_with_asked(draft, str(error)))
    return chosen(found, refused, first)
