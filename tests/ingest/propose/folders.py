"""Conversions of folders by proposals: what is used by itself, and what each candidate gives."""

import shutil
from pathlib import Path

import numpy as np

import tracestore
from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.claims import list_files
from tracestore.ingest.propose.proposal import propose


def propose_folder(arguments):
    """Return what files and folders may hold."""
    return propose(list_files(arguments, Path("-")))


def proposal_of(tmp_path):
    """Return the proposal for tmp_path/in."""
    return propose_folder([tmp_path / "in"])


def check_candidates(tmp_path, proposal):
    """Assert that each candidate gives what it printed, or is refused; return the stores of those that convert."""
    assert len(proposal.candidates) <= 6
    stores = []
    for number, candidate in enumerate(proposal.candidates):
        path = tmp_path / f"candidate{number}.zarr"
        shutil.rmtree(path, ignore_errors=True)
        try:
            tracestore.convert_files(tmp_path / "in", path, layout=candidate.layout.to_entries())
        except InvalidInputError:
            continue
        check_outcome(path, candidate)
        stores.append((candidate, path))
    return stores


def check_outcome(path, candidate):
    """Assert that a store holds what a candidate printed: N, L, S, D, first id, counts of labels."""
    outcome = candidate.outcome
    with tracestore.open(path) as store:
        traces = list(store)
        assert len(store) == outcome.num_traces or (outcome.is_partial and len(store) > outcome.num_traces)
        first = next((t for t in traces if t.question_id == outcome.first_id), None)
        assert first is not None, outcome.first_id
        states = first.last_token[:, None] if outcome.is_last_token else first.hidden_states
        assert np.asarray(states).shape[0] in (outcome.num_layers, outcome.num_layers - 1)
        assert np.asarray(states).shape[-1] == outcome.width
        if not outcome.is_partial and not outcome.is_last_token:
            sizes = {t.num_tokens for t in traces}
            assert (min(sizes), max(sizes)) == outcome.num_tokens
        for name, counts in outcome.counts.items():
            kept = (
                [t.label for t in traces]
                if name == "label"
                else list(store.named_scores(name.partition(".")[2] or name))
            )
            found = [v for v in kept if v == v]
            assert outcome.is_partial or counts == (sum(v == 1 for v in found), sum(v == 0 for v in found), len(found))


def refuse(tmp_path, words=""):
    """Assert that nothing is used by itself, that the message holds the words, and that no candidate is harmful."""
    proposal = proposal_of(tmp_path)
    assert proposal.layout is None, proposal.layout.to_toml()
    message = proposal.message()
    assert words in message, message
    check_candidates(tmp_path, proposal)
    return proposal


def accept(tmp_path):
    """Assert that a proposal is used by itself; return the traces by (id, sample)."""
    proposal = proposal_of(tmp_path)
    assert proposal.layout is not None, proposal.message()
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=proposal.layout.to_entries())
    return {(trace.question_id, trace.sample): trace for trace in tracestore.open(tmp_path / "s.zarr")}
