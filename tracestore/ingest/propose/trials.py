"""Trials: what a layout gives, by reading traces without storing them."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, TracestoreError, error_location, escape_unprintable
from tracestore.ingest.execute.arrays import check_ends
from tracestore.ingest.execute.axes import numbers_of
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.layout.fields import score_of
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.patterns import INNER_NAMES
from tracestore.ingest.layout.places import Plan, plan_of
from tracestore.ingest.propose.proofs import TEXT_COUNTS
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

_MAX_TRACES = 2000
_MAX_BYTES = 64 << 20
# The values of a record; its other fields belong to the reading.
_VALUES = (
    *("question_id", "sample", "attention", "last_token", "tokens", "tokens_decoded", "strings", "layer_ids"),
    *("prompt_length", "optional", "extras", "label", "scores", "deferred_scores", "group"),
)


@dataclass
class Outcome:
    """The result of a layout.

    Attributes
    ----------
    num_tokens : tuple of int
        The smallest and the largest number of tokens.
    counts : dict
        By field: how often 1, how often 0, and how many values.
    joins : list of str
        How rows were joined.
    is_partial : bool
        Whether there are more traces than those that were read.
    has_last_ids : bool
        Whether each trace has one id more than states, which is another one than that before it, if it has ids.
    has_whole_rows : bool
        Whether there is attention, and each row of it sums to 1.
    has_gaps : bool
        Whether tokens are zero in some layers and not in all.
    has_copies : bool
        Whether two traces have equal states of several tokens.
    has_passes : bool
        Whether each trace has passes of generation: one of several tokens, then of one; their number differs.
    ends : Counter
        How many single traces begin or end with one id twice, by the end and the id; see `_doubled_ends`.
    moved : list of str
        The fields of other files that are joined in order, where the ids are the numbers of rows in another order.
    has_lone_prompt : bool
        Whether a prompt_length differs from those before and behind it, which the columns of a batch do not.
    counts_text : bool
        Whether prompt_length is the number of characters, or of words, of the question in each trace.
    digest : bytes
        Digest of the values of all traces and of the meaning of scores: equal for layouts that give the same.
    """

    num_traces: int = 0
    num_layers: int = 0
    width: int = 0
    num_tokens: tuple[int, int] = (0, 0)
    first_id: str = ""
    is_last_token: bool = False
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    joins: list[str] = field(default_factory=list)
    is_partial: bool = False
    has_last_ids: bool = True
    has_whole_rows: bool = True
    has_gaps: bool = False
    has_copies: bool = False
    has_passes: bool = False
    ends: Counter[tuple[int, Any]] = field(default_factory=Counter)
    moved: list[str] = field(default_factory=list)
    has_lone_prompt: bool = False
    counts_text: bool = False
    digest: bytes = b""

    @property
    def varies(self) -> bool:
        """Return whether traces have different numbers of tokens."""
        return self.num_tokens[0] != self.num_tokens[1]

    @property
    def may_be_padded(self) -> bool:
        """Return whether single traces end as padded ones do; one of them among several sizes may end with an id twice."""
        return bool(self.ends) and (not self.varies or max(self.ends.values()) > 1)


def try_layout(layout: Layout, files: Mapping[str, Path], *, is_partial: bool = False) -> Outcome:
    """Return what a layout gives, by reading the traces without storing them.

    Parameters
    ----------
    layout : Layout
    files : Mapping
        Paths by their names below SRC.
    is_partial : bool
        Whether there are more files, so that the accounts of the run stay open.

    Raises
    ------
    InvalidInputError
        If an account does not close. Beyond some traces or bytes the accounts stay open.
    """
    execution = Execution(plan_of(layout), files)
    outcome = Outcome(is_last_token=layout.states == "last_token", is_partial=is_partial)
    labels: dict[str, list[float]] = {name: [] for name in layout.directions()}
    # Of each trace: tokens, those of the prompt, the question, and the position in a file with the id.
    facts: list[tuple[int, int, str, tuple[int, str]]] = []
    states: list[bytes] = []
    digest = hashlib.blake2b(str(sorted(layout.directions().items())).encode())
    try:
        for record in _records(execution, outcome):
            place, question = (record.position, record.question_id), record.strings.get("question", "")
            facts.append((record.num_tokens, record.prompt_length or 0, question, place))
            states.append(hashlib.blake2b(_content(record.hidden)).digest())
            digest.update(states[-1] + _content([getattr(record, name) for name in _VALUES]))
            _look_at(record, outcome)
            outcome.ends.update(_doubled_ends(record, layout))
            found = {**record.scores, **record.deferred_scores, "label": record.label}
            for name, values in labels.items():
                value = found.get(name, found.get(score_of(name)))
                values += [] if value is None or math.isnan(value) else [value]
        if not facts:
            raise InvalidInputError("no trace was found")
        if not outcome.is_partial:
            outcome.joins = [line for line in execution.close() if " rows of " in line and " joined " in line]
    finally:
        execution.release()
    sizes, prompts, questions, places = zip(*facts, strict=True)
    outcome.num_tokens = (min(sizes), max(sizes))
    outcome.has_passes = min(prompts) > 1 and len({size - prompt for size, prompt, *_ in facts}) > 1
    outcome.moved = _moved(execution.plan, places, is_partial=outcome.is_partial)
    outcome.has_lone_prompt = _has_lone([length for length in prompts if length])
    outcome.counts_text = all(questions) and any(tuple(map(count, questions)) == prompts for count in TEXT_COUNTS)
    outcome.digest = digest.digest()
    outcome.has_copies = not outcome.is_last_token and len(set(states)) < len(states)
    outcome.counts = {name: (values.count(1), values.count(0), len(values)) for name, values in labels.items()}
    return outcome


def _has_lone(lengths: Sequence[int]) -> bool:
    return any(a != b != c for a, b, c in zip([0, *lengths], lengths, lengths[1:], strict=False))


def is_padded_by(layout: Layout, outcome: Outcome, files: Mapping[str, Path]) -> bool:
    """Return whether the mask or lengths of a layout leave out exactly the tokens that are zero in all layers.

    Traces have different numbers of tokens: in another order of the axes, zeros and lengths would not agree.
    """
    entries = layout.to_entries()
    padding = [entries.pop(name) for name in ("S.mask", "S.lengths") if name in entries]
    if not padding or not outcome.varies:
        return False
    entries["ignore"] = [*entries.get("ignore", ()), *(str(line).rpartition(" -> ")[0] or line for line in padding)]
    return _gives_the_same({**entries, "S.padding": "zeros"}, outcome, files)


def counts_no_padding(layout: Layout, outcome: Outcome, files: Mapping[str, Path]) -> bool:
    """Return whether prompt_length counts tokens: no trace has padding in front of them, and lengths are those of no batches."""
    return outcome.has_lone_prompt and _gives_the_same({**layout.to_entries(), "S.prompt": "columns"}, outcome, files)


def _gives_the_same(entries: Mapping[str, Any], outcome: Outcome, files: Mapping[str, Path]) -> bool:
    """Return whether a layout of these entries gives the values of an outcome."""
    with suppress(TracestoreError):
        other = parse_layout(entries, "proposal")
        return try_layout(other, files, is_partial=outcome.is_partial).digest == outcome.digest
    return False


def _records(execution: Execution, outcome: Outcome) -> Iterator[TraceRecord]:
    """Yield the records of a run up to a bound, and count them; the run has one L, one D, and each id once."""
    seen: set[tuple[str, int]] = set()
    num_bytes = 0
    for group in execution.groups:
        for record in execution.read(group, None, Scratch()):
            size, key = (record.num_layers, record.hidden_dim), (record.question_id, record.sample)
            if not seen:
                outcome.num_layers, outcome.width = size
                outcome.first_id = record.question_id
            with error_location(group.name):
                if size != (outcome.num_layers, outcome.width):
                    expected = f"L {outcome.num_layers}, D {outcome.width}"
                    raise InvalidInputError(f"found L {size[0]}, D {size[1]}, expected {expected}")
                if key in seen:
                    names = [n for n in execution.plan.states[0].address.files.names if n not in (*INNER_NAMES, "id")]
                    way = f'; question_id = "={{{names[0]}}}_{{id}}" would tell them apart' if names else ""
                    raise InvalidInputError(f"the id {escape_unprintable(key[0], 40)!r} occurs in two files{way}")
            if outcome.num_traces >= _MAX_TRACES or num_bytes > _MAX_BYTES:
                outcome.is_partial = True
                return
            seen.add(key)
            outcome.num_traces += 1
            num_bytes += size[0] * size[1] * record.num_tokens * 4
            yield record


def _moved(plan: Plan, ids: Sequence[tuple[int, str]], *, is_partial: bool) -> list[str]:
    """Return the ids, labels and texts of other files that are joined in order, if the ids number rows in another order.

    Ids of the states' own files may be larger than the number of rows: then they number none.
    """
    numbers: dict[tuple[int, str], list[int]] = {}
    file = 0
    for position, text in ids:
        file += position == 0 and not plan.is_global
        match = re.fullmatch(r"(\D*)(\d+)", text)
        if match is None:
            return []
        numbers.setdefault((file, match[1]), []).append(int(match[2]))
    if all(those == sorted(those) for those in numbers.values()):
        return []
    # A table that states where its rows begin may have any order.
    own = {p.address.files for p in plan.places if p.name in (plan.layout.states, "S.starts", "S.ends")}
    others = (p for p in plan.others if "N" in p.trace_names and p.address.files not in own)
    moved = sorted({p.name for p in others if p.name == "question_id" or p.rule.kind in ("score", "text")})
    are_rows = len({text for _, text in numbers}) == 1 and (is_partial or max(map(max, numbers.values())) <= len(ids))
    return moved if "question_id" in moved or are_rows else []


def _look_at(record: TraceRecord, outcome: Outcome) -> None:
    """Add what the values of a trace show; tokens that are zero in all layers are refused by rule 24."""
    ids = record.tokens
    sums = [numbers_of(layer).astype("f4").sum(-1) for layer in record.attention or ()]
    outcome.has_last_ids &= ids is None or (len(ids) > record.num_tokens and ids[-1] not in ids[-2:-1])
    outcome.has_whole_rows &= bool(sums) and all(np.allclose(one, 1, atol=0.02) for one in sums)
    outcome.has_gaps |= any(not numbers_of(layer).any(-1).all() for layer in record.hidden or ())


def _doubled_ends(record: TraceRecord, layout: Layout) -> Iterator[tuple[int, Any]]:
    """Yield the ends of a trace at which two tokens have one id or text, with it; of states alone equal ones, twice."""
    axes = {*(layout.addresses[layout.states][0].axes or ())}
    if not axes.isdisjoint(("N", "(N S)")) or layout.settings.get("S.padding") == "none":
        return
    found = [
        list(values[: record.num_tokens]) for values in (record.tokens, record.tokens_decoded) if values is not None
    ]
    for own in found:
        pairs = (own[:2], own[-2:]) if len(set(own)) > 1 else ()  # ids that are all equal say nothing
        yield from ((k, pair[0]) for k, pair in enumerate(pairs) if pair[0] == pair[1])
    try:
        if record.hidden is not None and "P" not in axes and not found:
            check_ends(record.hidden, "hidden_states")
    except InvalidInputError:
        yield from [(0, None)] * 2


def _content(value: Any) -> bytes:
    """Return values as bytes."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(f"{name} ".encode() + _content(value[name]) for name in sorted(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return b"[" + b",".join(map(_content, value)) + b"]"
    return repr(value).encode()
