"""Test patterns of names: what varies, and what the words next to it say."""

import pytest

from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.propose.names import families, words_of

CASES = [
    (["q0.npz", "q1.npz"], {"{id}.npz"}),
    (["q0_layer0.npy", "q0_layer1.npy", "q1_layer0.npy"], {"{id}_layer{layer}.npy"}),
    (["layer_0/q0.pt", "layer_1/q0.pt", "layer_0/q1.pt"], {"layer_{layer}/{id}.pt"}),
    (["hidden_states.npy", "labels.npy"], {"hidden_states.npy", "labels.npy"}),
    (["train.npz", "test.npz"], {"{split}.npz"}),
    (["correct/q0.pt", "hallucinated/q1.pt"], {"{verdict}/{id}.pt"}),
    (["batch_0.pt", "batch_1.pt"], {"batch_{chunk}.pt"}),
    (["rank0.pt", "rank1.pt"], {"rank{rank}.pt"}),
    (["q0/response_0.pt", "q0/response_1.pt", "q1/response_0.pt"], {"{id}/response_{sample}.pt"}),
    (["tqa_0.pt", "tqa_1.pt"], {"{id}.pt"}),
    (["1ffa32280d85.npy", "d73d6203bebf.npy", "9fcdbc2f6721.npy", "e9ef1b5e3868.npy"], {"{id}.npy"}),
    (["q_1ffa32280d.npy", "q_d73d6203be.npy", "q_0123456789.npy"], {"{id}.npy"}),
    (["r-1c3b.npy", "r-d2d4.npy", "r-a3f0.npy", "r-4955.npy"], {"{id}.npy"}),
    ([f"550e8400-{part}-9716-446655440000.npy" for part in ("e29b-41d4", "d8f1-4adf", "d244-4b77")], {"{id}.npy"}),
    (["b/a100.npy", "b/b200.npy", "b/layer_4.npy"], {"b/{id}.npy", "b/layer_{layer}.npy"}),
    (["d100.npy", "d200.npy"], {"d{dim}.npy"}),
    (["hs_0.npy", "hs_1.npy", "tok_0.npy", "tok_1.npy"], {"hs_{id}.npy", "tok_{id}.npy"}),
    (["hs_0.npy", "hs_1.npy", "tok_1.npy", "tok_2.npy"], {"hs_{id}.npy", "tok_{token}.npy"}),
    (["layer_12345678.npy", "layer_10000001.npy"], {"layer_{layer}.npy"}),
    (["d1d2q1.npy", "d1d2q2.npy"], {"d1d2q1.npy", "d1d2q2.npy"}),
    (["coqa_1.pkl.gz", "coqa_2.pkl.gz"], {"{id}.pkl.gz"}),
    (["q1.jsonl.zst", "q2.jsonl.zst"], {"{id}.jsonl.zst"}),
    (["layer_0.npy.xz", "layer_1.npy.xz"], {"layer_{layer}.npy.xz"}),
    (["a/q1.npy.bz2", "a/q2.npy.bz2"], {"a/{id}.npy.bz2"}),
    (["q1.gz", "q2.gz"], {"{id}.gz"}),
    (["q0_hidden.npy", "q1_hidden.npy", "q0_attn.npy", "q1_attn.npy"], {"{id}_hidden.npy", "{id}_attn.npy"}),
]


@pytest.mark.parametrize(("names", "patterns"), CASES)
def test_patterns_of_files(names, patterns):
    found = families(names, is_path=True)

    assert {family.pattern for family in found} == patterns
    for family in found:
        for name, bound in family.members.items():
            match = Pattern(family.pattern, is_path=True).match(name)
            assert match is not None
            assert {key: str(value) for key, value in match.bound.items()} == bound


@pytest.mark.parametrize(
    ("names", "may_repeat"),
    [
        ("q1_t0.7 q1_t1.0 q2_t0.7 q2_t1.0", True),
        ("q1_t0.7 q1_t1 q2_t0.7 q2_t1", True),
        ("paris_0 paris_1 new_york_0 new_york_1", True),
        ("q1 q1_2 q2 q2_2", True),
        ("q1 q1_greedy q2 q2_greedy", True),
        ("q1_llama7b q1_llama q2_llama7b q2_llama", True),
        ("llama7b_q1 llama_q1 llama7b_q2 llama_q2", True),
        ("q1_v1.2 q1_v2 q2_v1.2 q2_v2", True),
        ("3f2a-0 3f2a-1 9bcd-0 9bcd-1", True),
        ("001a 001b 002a 002b", True),
        ("c1a0 c1a1 c2a0 c2a1", True),
        ("q1 q2 q10", False),
        ("new_york new_jersey paris", False),
        ("tqa_1 tqa_2 nq-open_3", False),
        ("550e8400-e29b-41d4-a716 6ba7b810-9dad-11d1-80b4 f47ac10b-58cc-4372-a567", False),
        ("1c3b d2d4 a3f0", False),
    ],
)
def test_ids_with_a_piece_that_may_be_no_part_of_them_rule_23(names, may_repeat):
    (family,) = families([f"{name}.npz" for name in names.split()], is_path=True)

    assert family.names == ("id",)
    assert bool(family.doubt) == may_repeat


def test_a_name_without_a_pattern_is_escaped():
    (family,) = families(["a{b}*.npz"], is_path=True)
    assert Pattern(family.pattern, is_path=True).literal == "a{b}*.npz"


def test_words():
    assert words_of("hiddenStates_12.lastToken") == ("hidden", "states", "last", "token")


def test_the_name_of_a_score_is_no_id():
    assert {family.pattern for family in families(["token_f1", "rouge1"])} == {"token_f1", "rouge1"}
