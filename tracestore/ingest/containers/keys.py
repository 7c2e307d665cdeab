"""The names of arrays in a container: which field, layer and trace they belong to."""

import re
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")

# Names of the fields, besides those of docs/ingest.md.
# What a name calls states after a word such as hidden or last_token.
_KIND = r"(?:states?|acts?|activations?|reps?|reprs?|representations?|vec(?:tor)?s?|emb(?:ed(?:ding)?)?s?|features?|layers?|outputs?)"
_OF_MODEL = r"(?:(?:all|last|layer|decoder|model|llm|internal|residual|resid)_)*"
_HIDDEN = (
    rf"(?:{_OF_MODEL}hidden(?:_?{_KIND})?|{_OF_MODEL}(?:representations?|reprs?|reps|activations?|acts))(?:_?flat(?:tened)?)?"
    r"|hiddens|hs|internal_states?|resid(?:ual)?s?(?:_streams?)?(?:_states?)?|resid_post"
)
_ATTENTION = (
    r"(?:(?:all|decoder|self|layer|model|causal)_)*(?:attentions?|attns?|atts?)"
    r"(?:_(?:weights?|maps?|probs?|probabilities|scores?|matri(?:x|ces)|patterns?|tensors?))?"
)
_TOKENS = r"tokens|(?<=most_likely_)generation_ids|token_ids|(?:input|input_output|input_and_output|prompt_(?:and_)?(?:answer|response|output))_ids|sequences"
_LAST_TOKEN = (
    rf"(?:last|final|eos)_?(?:(?:prompt|input|answer|response|generated)_)?(?:tokens?|tok)(?:_hidden)?(?:_{_KIND})?"
    rf"|eos_(?:hidden(?:_{_KIND})?|{_KIND})|layer_wise"
)
# Names of one answer among several: most_likely_generation_hidden_states.
_OF_ANSWER = r"(?:(?:most_likely|greedy)_(?:(?:generation|answer|sequence)_)?)?"
_NAMES = (
    rf"{_OF_ANSWER}(?:(?P<last>{_LAST_TOKEN})|(?P<hidden>{_HIDDEN})|(?P<attention>{_ATTENTION})|(?P<tokens>{_TOKENS}))"
)
# The name of a trace before a field: anything before a dot or slash, or something with a digit before _ or -.
_TRACE = r"(?:(?P<trace>.+?)[./]|(?P<trace_>.*?\d.*?)[_\-])??"
# hidden_states, q1/hidden_states, tc_12_hidden_states, hidden_states.3, hidden_states_layer_3, q1/hidden_states/3
_NAMED = re.compile(
    rf"{_TRACE}(?:{_NAMES})(?:[._/\-]?(?P<word>(?:layers?|blocks?)[._/\-]?)?(?P<number>\d+))?", re.IGNORECASE
)
# L03 before a kind of output: L03_hidden.
_SHORT_LAYER = rf"l(?:yr)?_?(?=\d+_(?:{_HIDDEN}|{_ATTENTION}|{_KIND})$)"
# layer_3, model.layers.3, blocks.3.hook_resid_post (TransformerLens), layer_3/hidden_states
_BY_LAYER = re.compile(
    rf"{_TRACE}(?:(?:model|transformer|gpt_neox|language_model|decoder)[./])*"
    rf"(?:(?:(?:{_KIND}|h|x)_)?(?:layers?|blocks?)[._/\-]?|h\.|{_SHORT_LAYER})(?P<number>\d+)(?:[._/\-](?P<kind>.+))?",
    re.IGNORECASE,
)
_OUTPUT = re.compile(
    rf"(?:hook_)?(?:resid_(?:post|pre|mid)|mlp_out|attn_out|out(?:put)?|{_HIDDEN}|{_KIND})(?:\.output)?"
)
_LAST = re.compile(r"(?:last|final)(?:_?tok(?:en)?)?", re.IGNORECASE)
# The module self_attn returns other values than attention.
_PATTERN = re.compile(rf"(?!self_att(?:n|ention)$)(?:(?:self_)?attn[./])?(?:hook_pattern|pattern|{_ATTENTION})")
# A step of generation, and a head: step_3, steps/3, q1_token_3, head.0. `tokens_3` are the tokens of a trace.
_STEP = re.compile(
    r"(?:^|(?<=[./_\-]))(?:gen(?:erat(?:ion|ed))?_|decod(?:e|ing)_)?"
    r"(?:(?:step|pass|token|tok|pos|position|timestep)[./_\-]?|(?:steps|passes|timesteps|tokens|positions)[./])(\d+)"
    r"(?=$|[./_\-])",
    re.IGNORECASE,
)
_HEAD = re.compile(r"(?:^|(?<=[./_\-]))heads?[./_\-]?(\d+)(?=$|[./_\-])", re.IGNORECASE)
_SPLIT = re.compile(r"[./_\-]")
# Names with one value per trace: ids and labels, with a prefix such as that of the file.
_COLUMN = re.compile(
    r"(?:.*?[_.\-])??(?<!layer_)(?<!token_)(?<!input_)(?<!head_)(?<!logit_)(?<!tuned_)(?P<name>(?:(?:question|example|sample|prompt)_?)?(?:ids?|idxs?|ind(?:ex|ices))|[qu]_?ids?"
    r"|q_ind(?:ex|ices)|labels?|truthful|(?:[a-z]+_)?scores?|correct(?:ness)?|is_correct|hallucinat(?:ion|ed)"
    r"|y|lengths?|(?:token_|seq_?)?lens?|(?:attention_)?mask|questions?|answers?|prompts?|responses?)",
    re.IGNORECASE,
)
# Names of numbers of tokens.
LENGTHS = (
    "lens",
    "token_lengths",
    "token_lens",
    "seqlens",
    "num_tokens",
    "length",
    "lengths",
    "seq_len",
    "seq_lens",
    "seq_lengths",
    "sequence_length",
    "sequence_lengths",
    "token_counts",
)
# Names of groups of traces that are no ids.
SPLITS = frozenset(("train", "test", "val", "valid", "validation", "dev"))
# Names of groups and nested dicts that hold fields of the same traces each.
SECTIONS = frozenset(
    (
        "input",
        "inputs",
        "model_inputs",
        "output",
        "outputs",
        "model_outputs",
        "meta",
        "metadata",
        "info",
        "internals",
        "targets",
    )
)
# Names of groups and nested dicts whose members are traces.
GROUPS_OF_TRACES = frozenset(("traces", "samples", "data", "examples", "questions", "activations", "results"))
# Names of lists whose items are layers or tokens of one trace.
LISTS_OF_LAYERS = re.compile(r"(?:all_|hidden_)?(?:layers|blocks|layer_(?:outputs|states))", re.IGNORECASE)
LISTS_OF_TOKENS = re.compile(
    r"(?:all_|generated_|output_|per_)?(?:tokens?|features|steps|words|positions|timesteps|pieces|nodes|token_(?:states|data)"
    r"|trajectory|generation_steps|states)",
    re.IGNORECASE,
)
# Fields of the values of single tokens.
OF_TOKENS = {"logprob": "token_logprob", "log_prob": "token_logprob", "entropy": "token_entropy"}
ID_KEYS = ("question_id", "qid", "id", "example_id", "sample_id", "uid", "idx", "index")
# Names of the ids of traces in tables, and in files without a more usual id.
ID_NAME = re.compile(
    r"(?:q|question|ex|example|sample|prompt|doc(?:ument)?|item|data|instance|problem|task|req|request|custom|record"
    r"|query|conv(?:ersation)?|case|text|sentence|seq(?:uence)?|trace|traj(?:ectory)?|passage|article|entry|statement)"
    r"_?(?:id|idx|index|no|num|number|key|hash|uu?id)|uuid|guid|key|example|sample",
    re.IGNORECASE,
)

# Numbers in the names of models: llama-2, 7b.
MODEL_NUMBER = re.compile(
    r"(?:llama|gpt|qwen|gemma|phi|mistral|opt|pythia|vicuna|olmo|t5)[_\-]?v?\d+(?:\.\d+)*|(?<![a-z\d])\d+(?:\.\d+)?[bm](?![a-z\d])",
    re.IGNORECASE,
)
_WORD_OF_ANSWER = (
    r"(?:sample|gen(?:eration)?|completion|response|resp|answer|rollout|attempt|output|candidate|draw|repeat|rep)s?"
)
_ANSWER = re.compile(rf"{_WORD_OF_ANSWER}[._/\-]?(\d{{1,6}})|[skgar](\d{{1,4}})", re.IGNORECASE)
_QUESTION_WORD = r"(?:q|question|p|prompt|ex|example|item|id|case|doc|query|problem|task|.*qa)"
_QUESTION = re.compile(rf"{_QUESTION_WORD}s?[_\-.:#]?\d+", re.IGNORECASE)
# A name that ends with a number of its own, or is one: tqa_0, squad-12, 17; or a hash.
_ID = re.compile(r"\d+|.*[_\-.:#]\d+|(?=.*\d)[0-9a-f\-]{8,}", re.IGNORECASE)
_NO_ID = re.compile(
    r"(?:.*[_\-.])?(?:run|seed|fold|batch|shard|part|chunk|split|set|rank|worker|exp(?:eriment)?|epoch|ckpt|checkpoint"
    r"|step|layer|block|head|trial|temp(?:erature)?|version|v|group|train|test|val|valid|dev|model|data(?:set)?"
    r"|file|hidden|acts?|activations?|states?|features?|outputs?|tensors?|results?|samples?|traces?|[skgar])[_\-.]?\d+"
    r"|\d{4}[_\-]\d\d?[_\-]\d\d?|.*[_\-.]0\.\d+",
    re.IGNORECASE,
)
# Names of the number of an answer among those to its question, next to the id of the question.
SAMPLE_NAMES = tuple(
    f"{word}_{number}"
    for word in ("gen", "generation", "completion", "rollout", "attempt", "response", "answer", "output", "candidate")
    for number in ("idx", "index", "id", "num", "number", "no")
)
SAMPLE_NAMES += ("attempt", "rollout", "repeat", "rep", "trial", "draw", "k")
SAMPLE_NAMES += ("sample_idx", "sample_index", "sample_id", "sample_num", "sample_number", "sample_no", "sampleid")


# Outputs of a layer, the preferred one first; the name of a hook of TransformerLens may end with the second part.
_KINDS = ("resid_post", "output", "out", "", "hidden_states", "resid_pre", "resid_mid", "mlp_out", "attn_out")


class Key(NamedTuple):
    """Parts of the name of an array: field, number, name of the trace, kind of output, and whether the number is a layer.

    `locate` adds the step of generation, and the head.
    """

    field: str
    number: int | None = None
    trace: str = ""
    kind: str = ""
    is_layer: bool = False
    step: int | None = None
    head: int | None = None


@lru_cache(maxsize=1 << 16)
def parse_key(name: str) -> Key | None:
    """Return what a name says about hidden states, attention or tokens; None for the name of another field.

    Examples
    --------
    >>> parse_key("q1/hidden_states.3")
    Key(field='hidden_states', number=3, trace='q1', kind='', is_layer=False)
    >>> parse_key("blocks.3.hook_resid_post")
    Key(field='hidden_states', number=3, trace='', kind='hook_resid_post', is_layer=True)
    """
    if match := _NAMED.fullmatch(name):
        number = match["number"]
        if not (layer := _BY_LAYER.fullmatch(name)) or number is not None:
            is_named = match["word"] is not None or "layer" in (match["hidden"] or "").lower()
            is_layer = number is not None and is_named
            return Key(_field(match), None if number is None else int(number), _trace(match), is_layer=is_layer)
        match = layer
    elif not (match := _BY_LAYER.fullmatch(name)):
        return None
    kind = match["kind"] or ""
    if _LAST.fullmatch(kind):
        return Key("last_token", int(match["number"]), _trace(match), is_layer=True)
    if not kind or _OUTPUT.fullmatch(kind):
        return Key("hidden_states", int(match["number"]), _trace(match), kind, is_layer=True)
    return Key("attentions", int(match["number"]), _trace(match), is_layer=True) if _PATTERN.fullmatch(kind) else None


@lru_cache(maxsize=1 << 16)
def locate(name: str) -> Key | None:
    """Return what a name says about an array: field, layer and trace as in `parse_key`, and the step and head in it.

    Examples
    --------
    >>> locate("q1/step_2/layer_3")
    Key(field='hidden_states', number=3, trace='q1', kind='', is_layer=True, step=2, head=None)
    """
    rest, step = without_step(name)
    match = _HEAD.search(rest)
    key = parse_key(rest if match is None else _without(rest, match))
    if key is None or (match is not None and key.field != "attentions"):
        return None
    return key._replace(step=step, head=None if match is None else int(match[1]))


def is_state_name(name: str) -> bool:
    """Return whether a name is that of hidden states or last tokens, or of a layer of them, of the only trace."""
    key = locate(name)
    return key is not None and key.field in ("hidden_states", "last_token") and not key.trace


def without_step(name: str) -> tuple[str, int | None]:
    """Return a name without its step of generation, such as step_3 or token_3, and the step; None without one."""
    match = _STEP.search(name)
    return (name, None) if match is None else (_without(name, match), int(match[1]))


def is_step(name: str) -> bool:
    """Return whether a name is that of a step, or of the group of all steps."""
    return _STEP.fullmatch(name) is not None or name.lower() in ("steps", "passes", "timesteps")


def _without(name: str, match: re.Match[str]) -> str:
    before, after = name[: match.start()], name[match.end() :]
    return before.rstrip("./_-") if not after else before + after.lstrip("./_-")


def column_name(name: str) -> str | None:
    """Return the name of a column with one value per trace, without what precedes it; None for another name."""
    match = _COLUMN.fullmatch(name)
    return None if match is None else match["name"].lower()


def layer_kind(key: Key) -> str:
    """Return the kind of output of a layer."""
    return key.kind.lower().removeprefix("hook_")


def outputs_of_layers(kinds: Mapping[str, Mapping[int, Value]]) -> dict[int, Value]:
    """Return the values of the layers in order: those of the kind of output that is read, of several.

    What enters layer 3, `resid_pre`, is what layer 2 returns, if more layers have it.
    """
    kind = min(kinds, key=lambda name: _KINDS.index(name) if name in _KINDS else len(_KINDS))
    found, before = kinds[kind], kinds.get("resid_pre", {})
    if kind == "resid_post" and len(before) > len(found):
        found = {number - 1: value for number, value in before.items() if number} | dict(found)
    return {number: found[number] for number in sorted(found)}


def _trace(match: re.Match[str]) -> str:
    return match["trace"] or match["trace_"] or ""


def _field(match: re.Match[str]) -> str:
    names = {"hidden": "hidden_states", "attention": "attentions", "tokens": "tokens", "last": "last_token"}
    return next(field for group, field in names.items() if match[group])


def split_key(name: str, traces: Container[str]) -> tuple[str, str]:
    """Return (trace, field) of the name of another field, if it begins or ends with one of `traces`; else ("", name)."""
    marks = list(_SPLIT.finditer(name))
    for match in reversed(marks):
        if name[: match.start()] in traces:
            return name[: match.start()], name[match.end() :]
    for match in marks:
        if match[0] in "./" and name[match.end() :] in traces:
            return name[match.end() :], name[: match.start()]
    return "", name


def is_question_name(name: str) -> bool:
    """Return whether a name looks like the id of a question, and not like that of a run, split, batch, or model."""
    last = MODEL_NUMBER.sub("", name.rpartition("/")[2])
    if " " in name.strip():
        return True  # the text of a question
    return _NO_ID.fullmatch(last) is None and (_ID.fullmatch(last) or _QUESTION.fullmatch(last)) is not None


def question_of(name: str) -> str:
    """Return the id of a question that the name of several answers states, without the suffix of a file; else ""."""
    name = re.sub(r"(?:\.[a-z][a-z0-9]*)+$", "", name, flags=re.IGNORECASE)
    return name if _QUESTION.fullmatch(name.rpartition("/")[2]) else ""


@lru_cache(maxsize=1 << 14)
def split_sample(name: str) -> tuple[str, int] | None:
    """Return the id of a question and the number of an answer to it that a name states; None for another name.

    Examples
    --------
    >>> split_sample("tqa_0/sample_1"), split_sample("q3_gen2"), split_sample("sample_1/q0"), split_sample("q3/1")
    (('tqa_0', 1), ('q3', 2), ('q0', 1), ('q3', 1))
    >>> split_sample("sample_1"), split_sample("llama-2/sample_1"), split_sample("train/sample_1")
    (None, None, None)
    """
    for mark in re.finditer(r"[._/\-]+", name):
        before, after = name[: mark.start()], name[mark.end() :]
        if not before or not after:
            continue
        if (match := _ANSWER.fullmatch(after)) and is_question_name(before):
            return before, int(match[1] or match[2])
        if "/" in mark[0] and (match := _ANSWER.fullmatch(before)) and match[1] and is_question_name(after):
            return after, int(match[1])
        is_number = "/" in mark[0] and after.isdecimal() and len(after) < 5
        if is_number and _QUESTION.fullmatch(before.rpartition("/")[2]):
            return before, int(after)
    return None


def id_of_name(name: str) -> dict[str, str | int]:
    """Return the id that the name of a trace gives it, and the number of the answer if the name states both."""
    found = split_sample(name)
    return {"question_id": name} if found is None else {"question_id": found[0], "sample": found[1]}
