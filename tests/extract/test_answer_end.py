"""Test where an answer ends, and how many tokens are decoded to find it."""

import random
import re

import pytest

from tracestore.extract.answer_end import AnswerEnd

EOS = 0
WORDS = ["", "a", "Paris", " is", ".", "\n", "!", " St", '"', " 3", ".5", "\n\n", " ", " naïve", "x\n", ")", " of", "?"]


class Tokenizer:
    """Token k is the bytes `pieces[k]`. Counts the tokens that are decoded."""

    def __init__(self, pieces):
        self.pieces, self.decoded = [p if isinstance(p, bytes) else p.encode() for p in pieces], 0

    def decode(self, ids):
        self.decoded += len(ids)
        return b"".join(self.pieces[k] for k in ids).decode(errors="replace")


def oracle(tokenizer, ids):
    """Return (answer, method) by decoding the whole text at each token."""
    for k, token in enumerate(ids):
        if token == EOS:
            return ids[:k], "eos"
        text = tokenizer.decode(ids[: k + 1])
        if k and "\n" in text.lstrip():
            return ids[:k], "newline"
        following = tokenizer.decode(ids[k + 1 : k + 2])
        ends = re.search(r"[^\W\d_]{3,}[\"')\]]*[.!?]$|\d[.!?]$", text) is not None
        if ends and following[:1] in ("", " ", "\n") and ids[k + 1 : k + 2] != [EOS]:
            return ids[: k + 1], "sentence"
    return ids, "max_tokens"


def fed(tokenizer, ids):
    end = AnswerEnd(tokenizer, {EOS})
    for token in ids:
        end.add(token)
    return end


def test_end_is_that_of_the_whole_text():
    tokenizer, rng = Tokenizer(WORDS), random.Random(0)
    methods = set()
    for _ in range(3000):
        ids = [rng.choice(range(1, len(WORDS))) for _ in range(rng.randrange(12))]
        if rng.random() < 0.3:
            ids.append(EOS)
        end = fed(tokenizer, ids)
        assert (end.answer, end.method) == oracle(tokenizer, ids), [WORDS[k] for k in ids]
        methods.add(end.method)
    assert methods == {"eos", "newline", "sentence", "max_tokens"}


@pytest.mark.parametrize(
    ("pieces", "answer", "method"),
    [
        (["Paris", ".", " It", " is"], "Paris.", "sentence"),
        (["St", ".", " John", "\n"], "St. John", "newline"),
        (["3", ".", "5", " m"], "3.5 m", "max_tokens"),
        (["Paris", "."], "Paris.", "sentence"),
        (["\n", "\n", "Paris", "\n", "x"], "\n\nParis", "newline"),
        (["Paris", ".", "é".encode()[:1], "é".encode()[1:], "x"], "Paris.éx", "max_tokens"),
        (["Paris", ".", " \N{EM DASH}".encode()[:2], " \N{EM DASH}".encode()[2:]], "Paris.", "sentence"),
    ],
)
def test_ends_of_answers(pieces, answer, method):
    tokenizer = Tokenizer(["<eos>", *pieces])
    end = fed(tokenizer, list(range(1, len(pieces) + 1)))
    assert (tokenizer.decode(end.answer), end.method) == (answer, method)


def test_tokens_after_the_end_are_ignored():
    end = fed(Tokenizer(["<eos>", "a"]), [1, EOS, 1, 1])
    assert (end.answer, end.tokens, end.is_known) == ([1], [1, EOS], True)


@pytest.mark.parametrize("piece", ["a", "\N{SNOWMAN}", b"\xe2", b"\xff", ""])
def test_decoded_tokens_are_linear_in_the_length(piece):
    decoded = {}
    for length in (64, 512, 4096):
        tokenizer = Tokenizer(["<eos>", piece])
        fed(tokenizer, [1] * length)
        decoded[length] = tokenizer.decoded
    assert decoded[4096] <= 16 * 4096
    assert decoded[4096] - decoded[512] <= 8.1 * (decoded[512] - decoded[64])
