"""Proposals: layouts of files that nothing describes, used by themselves only where they are proved."""

from tracestore.ingest.propose.proposal import Candidate, Proposal, propose, propose_folder

__all__ = ["Candidate", "Proposal", "propose", "propose_folder"]
