"""Test the judges against the definitions that their sources publish."""

import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracestore.extract.judges import (
    JUDGES,
    containment,
    containment_f1,
    exact_match,
    judge_answer,
    rouge_l,
    token_f1,
    triviaqa_match,
)


def squad_normalize(text):
    """Normalize as evaluate-v2.0.py of SQuAD does."""

    def remove_articles(text):
        return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

    def remove_punctuation(text):
        return "".join(c for c in text if c not in set(string.punctuation))

    return " ".join(remove_articles(remove_punctuation(text.lower())).split())


def squad_f1(gold, answer):
    """Return compute_f1 of evaluate-v2.0.py of SQuAD."""
    gold, answer = squad_normalize(gold).split(), squad_normalize(answer).split()
    num_same = sum((Counter(gold) & Counter(answer)).values())
    if len(gold) == 0 or len(answer) == 0:
        return int(gold == answer)
    if num_same == 0:
        return 0
    precision, recall = num_same / len(answer), num_same / len(gold)
    return (2 * precision * recall) / (precision + recall)


def triviaqa_normalize(text):
    """Normalize as utils/dataset_utils.py of TriviaQA does."""
    text = text.replace("_", " ").lower()
    text = "".join(c if c not in set(string.punctuation + "‘’´`") else " " for c in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()).strip()


def subsequence_length(one, other):
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return subsequence_length(one[:-1], other[:-1]) + 1
    return max(subsequence_length(one[:-1], other), subsequence_length(one, other[:-1]))


TEXTS = st.lists(
    st.sampled_from(["the", "A", "fox", "U.S.", "don't", "so-called", "ran", "_", "é", "3,5", "’"]), max_size=6
).map(" ".join)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_judges_agree_with_the_published_scripts(answer, accepted):
    assert exact_match(answer, accepted) == max(squad_normalize(a) == squad_normalize(answer) for a in accepted)
    assert token_f1(answer, accepted) == pytest.approx(max(squad_f1(a, answer) for a in accepted))
    expected = max(triviaqa_normalize(a) == triviaqa_normalize(answer) for a in accepted)
    assert triviaqa_match(answer, accepted) == expected


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one, other):
    expected = 2 * subsequence_length(one, other) / max(1, len(one) + len(other))
    assert rouge_l(" ".join(one), [" ".join(other)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("judge", "answer", "accepted", "score"),
    [
        (exact_match, "The  Eiffel-Tower!", ["eiffeltower"], 1.0),
        (exact_match, "the U.S.", ["Canada", "US"], 1.0),
        (exact_match, "It is Paris", ["Paris"], 0.0),
        (triviaqa_match, "The Eiffel-Tower!", ["eiffel tower"], 1.0),
        (triviaqa_match, "Eiffel Tower", ["Paris", "La tour Eiffel"], 0.0),
        (containment, "The capital is Paris.", ["Paris"], 1.0),
        (containment, "Parisian life", ["Paris"], 0.0),
        (containment, "It is São Paulo!", ["sao paulo"], 1.0),
        (containment, "anything", ["the"], 0.0),
        (token_f1, "the red fox", ["red fox jumps"], 0.8),
        (token_f1, "nothing", [], 0.0),
        (containment_f1, "nothing", ["Paris"], 0.0),
        (containment_f1, "It is the red fox", ["red fox"], 1.0),
        (containment_f1, "the red fox", ["red fox jumps"], 0.8),
        # ROUGE-L of Lin (2004), section 3.1: two sentences with the same words in another order.
        (rouge_l, "police kill the gunman", ["police killed the gunman"], 0.75),
        (rouge_l, "the gunman kill police", ["police killed the gunman"], 0.5),
        (rouge_l, "", [""], 0.0),
    ],
)
def test_scores_of_answers(judge, answer, accepted, score):
    assert judge(answer, accepted) == pytest.approx(score)


def test_scores_have_six_decimals_and_the_names_of_judges():
    assert judge_answer(("token_f1", "containment"), "the red fox", ["red"]) == {
        "token_f1": 0.666667,
        "containment": 1.0,
    }
    assert set(JUDGES) == {"containment_f1", "containment", "token_f1", "exact_match", "triviaqa_match", "rouge_l"}


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("It is 2.5.", "5", 0),
        ("It is 2.5.", "2.5", 1),
        ("2,5", "2.5", 1),
        ("Born:1990,1991", "1991", 1),
        ("1,500", "500", 0),
        ("The result is 1,500.", "1500", 1),
        ("1500", "1,500", 1),
        ("1,234,567 people", "234", 0),
        ("1,234.5", "234", 0),
        ("1,234.5", "1234.5", 1),
        ("0.25", "25", 0),
        ("$12.50", "12", 0),
        ("12.50 dollars", "12.50", 1),
        ("5, 6 and 7", "6", 1),
        ("1,2,3", "2", 1),
        ("born on 12.5.1990", "1990", 1),
        ("in 1990.", "1990", 1),
        ("1914-1918", "1914", 1),
        ("at 10:45", "10:45", 1),
        ("30,000 to 40,000", "40000", 1),
        ("Paris,France", "France", 1),
        ("3.11.2", "11", 1),
    ],
)
def test_containment_takes_a_number_as_one_word(answer, accepted, expected):
    """A part of a number, such as its decimals, is another number."""
    assert containment(answer, (accepted,)) == expected
