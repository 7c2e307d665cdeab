"""Names that the fields of a trace have in the files of a user, for --map and scores, and the words of judges."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.format import schema
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.vocabulary import SCORES, score_of_word

INPUTS_PAGE = "docs/inputs.md"
# Fields that may have another name in a file.
MAPPABLE = (
    *("hidden_states", "attentions", "last_token", "layer_ids"),
    *("tokens", "tokens_decoded", "attention_mask", "lengths"),
    *("question_id", "sample", *schema.TEXT_FIELDS, "prompt_length", *schema.OPTIONAL_FIELDS, "label"),
)
# Names, as `normalized` returns them, that other programs give to fields. Where a field is missing, the first one found
# is taken for it; ID_NAME of containers.keys has further names of ids in tables. Integers under the names of COUNTERS
# may count the traces of one file; those of INDEX_KEYS are ids if they do not.
_MAKERS = ("model", "llm", "generated", "predicted", "pred", "greedy", "decoded")
_ANSWERS = ("answer", "response", "completion", "prediction", "generation", "output")
_IDS_OR_TEXTS = ("toks", "input_tokens", "output_tokens", "model_output_tokens", "greedy_tokens")
OTHER_NAMES = {
    "question_id": ("qid", "id", "uid", "prompt_id", "doc_id", "request_id", "example_id", "sample_id", "idx", "index"),
    "question": (
        *("prompt", "query", "instruction", "input", "input_text", "model_input", "question_text", "prompt_text"),
        *("user_prompt", "user_query", "input_prompt", "statement"),
    ),
    "generated_answer": (
        *("response", "completion", "prediction", "generation", "output"),
        *("model_output_text", "greedy_text", "most_likely_generation", "most_likely_answer"),
        *(f"{maker}_{name}" for maker in _MAKERS for name in _ANSWERS if (maker, name) != ("generated", "answer")),
        *(f"{name}_text" for name in _ANSWERS),
        "answer",
        "best_answer",
    ),
    "tokens": (
        *("token_ids", "all_tokens", "generated_ids", "output_ids", "generated_tokens", "prompt_token_ids", "sequence"),
        *_IDS_OR_TEXTS,
    ),
    "tokens_decoded": (
        *("str_tokens", "token_strs", "token_strings", "token_texts", "tokens_str", "decoded_tokens", "words"),
        *_IDS_OR_TEXTS,
    ),
}
COUNTERS = frozenset(("example_id", "sample_id", "idx", "index"))
INDEX_KEYS = ("idx", "index")
TOKENS_KEYS = ("tokens", "input_ids", "sequences")
# Keys any of which gives a field a value.
SAME = {"question_id": ("question_id", "global_example_id"), "generated_answer": schema.ANSWER_FIELDS}
QUESTIONS = ("question", *OTHER_NAMES["question"])
QUESTIONS_AND_ANSWERS = frozenset((*QUESTIONS, *schema.ANSWER_FIELDS, *OTHER_NAMES["generated_answer"]))
# Fields that may have another spelling.
SPELLED = frozenset((*MAPPABLE, *TOKENS_KEYS, "global_example_id"))
# Names of nested dicts with the answer.
OUTPUTS = ("output", "outputs", "model_output", "response", "generation", "completion", "prediction", "result")
# Names of nested dicts that describe the trace, and not its model, and the names of their fields.
_ABOUT_TRACE = frozenset(
    (
        *("request", "sample", "example", "question", "item", "record", "instance", "input", "inputs", "doc", "data"),
        *("meta", "metadata", "info", "row", "entry", "qa", "qa_pair", "text", "texts", "content", *OUTPUTS),
    )
)
_NESTED = frozenset((*OTHER_NAMES["question_id"][:6], *OTHER_NAMES["question"], *OTHER_NAMES["generated_answer"]))
# Names of nested dicts with scores.
JUDGMENTS = ("eval", "evals", "evaluation", "metrics", "scores", "judge", "judgment", "grading", "annotation")
# Words that are names of folders and groups of one class of answers.
_CLASSES = ("correct", "incorrect", "wrong", "hallucinated")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s\-]+")
# Axes of hidden states, from the outside: N traces, L layers, S tokens, D hidden size.
Axes = Literal["LSD", "SLD", "SD", "LD", "D", "NLSD", "LNSD", "NSLD", "NSD", "NLD", "LND", "NDL", "ND"]
_MAX_MAP_BYTES = 1 << 20


# Columns whose words have a meaning, and whose numbers do not. They count if there is none of SCORES.
WORD_COLUMNS = ("verdict", "judgment", "judge", "judge_label", "label", "labels")
# What the name of a score may have before or behind it without another meaning.
_AFFIX = re.compile(r"^(?:label|human)_|_(?:to_target|reward)$")
# Labels next to X, the input of a classifier; 1: hallucinated.
LABELS = "y"


@dataclass(frozen=True)
class KeyOptions:
    """Name the keys of the fields of a trace.

    Parameters
    ----------
    renamed : tuple of (str, str)
        Pairs of a field in MAPPABLE and its key in the files. A key may be a path through nested dicts, with dots.
    score_key : str, optional
        The only key with a score; by default all keys of `store.vocabulary.SCORES`.
    has_scores_file : bool
        Scores come from a scores file, so that scores and labels inside traces are not used.
    id_key : str, optional
        The column of the ids in the scores file: a key of this name is the id of a trace without question_id.
    is_index_id : bool
        Integers under the names of INDEX_KEYS are ids, because they do not begin again with each file.
    axes : str, optional
        Axes of the hidden states in the files, one of AXES.
    has_no_padding : bool
        The answers of a batch without attention_mask and lengths have no padding.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    score_key: str | None = None
    has_scores_file: bool = False
    id_key: str | None = None
    is_index_id: bool = False
    axes: str | None = None
    has_no_padding: bool = False


DEFAULT_KEYS = KeyOptions()


@lru_cache(maxsize=1 << 14)
def normalized(name: str) -> str:
    """Return a name in lower case, with underscores between its words.

    Examples
    --------
    >>> normalized("hiddenStates"), normalized("QUESTION_ID"), normalized("Exact Match")
    ('hidden_states', 'question_id', 'exact_match')
    """
    return _WORD.sub("_", name.strip()).lower()


@lru_cache(maxsize=1 << 14)
def known_name(column: str) -> str:
    """Return the name of a column in SCORES that differs by an affix alone; for others what `normalized` returns.

    Examples
    --------
    >>> known_name("label_hallucinated"), known_name("rougeL_to_target"), known_name("step")
    ('hallucinated', 'rouge_l', 'step')
    """
    name = normalized(column)
    known = _AFFIX.sub("", name)
    return known if known in SCORES else name


def direction_of(column: str) -> str | None:
    """Return what a high value of a column or key of this name means; None if that is not known."""
    return SCORES.get(known_name(column))


def parse_map(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs (field, key) of `--map`.

    Parameters
    ----------
    text : str
        ``field=key,field=key``, or the path of a TOML file with such lines (``field = "key"``).

    Raises
    ------
    UsageError
        If a field does not exist or appears twice, or the file cannot be read.
    """
    if text.endswith(".toml"):
        try:
            with open(text, "rb") as file:
                content = tomllib.loads(file.read(_MAX_MAP_BYTES).decode())
        except OSError as error:
            raise UsageError(f"--map {text}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"--map {Path(text).name}: {escape_unprintable(str(error), 200)}") from None
        pairs = list(content.items())
    else:
        items = [part.partition("=") for part in text.split(",") if part.strip()]
        pairs = [(field.strip(), key.strip()) for field, _, key in items]
    if not pairs:
        raise UsageError("--map: found nothing, expected field=key")
    for field, key in pairs:
        if field not in MAPPABLE:
            fields = ", ".join(MAPPABLE)
            raise UsageError(f"--map: found field {escape_unprintable(field, 60)!r}, expected field=key with {fields}")
        if not isinstance(key, str) or not key:
            raise UsageError(f"--map: found no key for {field}, expected {field}=key")
    if len({field for field, _ in pairs}) < len(pairs):
        raise UsageError("--map: a field appears twice")
    return tuple(pairs)


def fields_of_nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the nested dicts of a trace, such as the output of a tokenizer, have for its fields."""
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    texts = [v["text"] for k, v in nested.items() if normalized(str(k)) in OUTPUTS and isinstance(v.get("text"), str)]
    answer = {"generated_answer": texts[0]} if len(texts) == 1 else {}
    return answer | {
        k: v
        for key, value in reversed(nested.items())
        for k, v in value.items()
        if v is not None and (k in SPELLED or (k in _NESTED and normalized(str(key)) in _ABOUT_TRACE))
        if key != "doc" or k not in OTHER_NAMES["generated_answer"]  # a reference, by lm-evaluation-harness
    }


@lru_cache(maxsize=1 << 10)
def label_of_path(path: str) -> float | None:
    """Return the label (1: hallucination) that the name of a class among the parts of a path states; None without one.

    Examples
    --------
    >>> label_of_path("activations/hallucinated"), label_of_path("correct/q0"), label_of_path("train/q0")
    (1.0, 0.0, None)
    """
    labels = {score_of_word(part, HALLUCINATION) for part in path.lower().split("/") if part in _CLASSES}
    return labels.pop() if len(labels) == 1 else None
