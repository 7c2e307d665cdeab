"""Proposals: layouts of files that nothing describes, used by themselves only where they are proved.

The way of a proposal, with what each step knows of the folder::

    files ─observe─► Leaf ─meaning_of─► Meaning ─Places─► Identity ─states_axes─► Frame
                                                                                    │ Drafter
    Proposal ◄─chosen── Candidate ◄─try_layout── Draft ◄─left_over─ Case.unproved ◄─┘

| step | module | knows | never takes into account |
|---|---|---|---|
| a place of values | `looking`, `leaves`, `names` | kinds, extents, patterns of names | what words mean for a trace |
| its field | `meanings` | words, kinds, ranks | extents |
| how traces are told apart | `identities` | fields, patterns, ids | extents |
| order of axes | `orders` | extents of leaves that are joined | words |
| a layout, what is not proved, what is left out | `drafts`, `proofs` | all of these | values of arrays |
| what it gives | `trials` | values, by an `Execution` of the layout | names |
| which of several are left | `candidates`, `proposal` | outcomes and refusals | names |
"""
