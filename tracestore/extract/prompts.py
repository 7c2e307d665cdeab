"""Prompts: chat templates, plain templates, and conversations of several turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from jinja2 import TemplateError

from tracestore.errors import UsageError
from tracestore.extract.model import LanguageModel

# Prompt for a model without a chat template.
PLAIN_PROMPT = "{instruction}\nQ: {question}\nA:"
# Stands for an answer while the text after it is rendered.
_ANSWER = "<<tracestore-answer>>"


@dataclass(frozen=True)
class PromptTemplate:
    """A chat template in Jinja or, for models without one, a text with {instruction} and {question}."""

    text: str
    is_chat: bool


def read_template(path: Path) -> PromptTemplate:
    """Return the template in a file: a chat template if the name ends with .jinja, else a plain one.

    Raises
    ------
    UsageError
        There is no such file, it is no text in UTF-8, or a plain template lacks {question}.
    """
    try:
        template = PromptTemplate(path.read_text(encoding="utf-8"), path.suffix == ".jinja")
    except OSError as error:
        raise UsageError(f"{path}: no prompt template: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: no prompt template: expected text in UTF-8") from None
    if not template.is_chat and "{question}" not in template.text:
        raise UsageError(f"{path}: found no {{question}}; a chat template in Jinja needs a name that ends with .jinja")
    return template


def template_of(lm: LanguageModel) -> PromptTemplate:
    """Return the chat template of a model, or PLAIN_PROMPT if it has none."""
    own = lm.tokenizer.chat_template
    if not own:
        return PromptTemplate(PLAIN_PROMPT, False)
    # Some tokenizers have several templates by name.
    return PromptTemplate(own if isinstance(own, str) else lm.tokenizer.get_chat_template(), True)


def prompt_of_turn(
    lm: LanguageModel, template: PromptTemplate, instruction: str, questions: Sequence[str], answers: Sequence[str]
) -> list[int]:
    """Return the token ids before the answer to the last question: all, or those that follow the last answer.

    The answers themselves keep the tokens that the model generated. An empty instruction gives no system message.

    Raises
    ------
    UsageError
        There are answers, and the template is plain or leaves them out.
    """
    if not template.is_chat and answers:
        raise UsageError("questions of several turns need a chat template: pass --prompt-template FILE.jinja")
    if not template.is_chat:
        # Only these names are replaced, so that a template may contain other braces.
        text = template.text.replace("{instruction}", instruction).replace("{question}", questions[0])
        return list(lm.tokenizer(text)["input_ids"])
    messages = [{"role": "system", "content": instruction}] if instruction else []
    for question, answer in zip_longest(questions, [*answers[:-1], _ANSWER] if answers else []):
        messages.append({"role": "user", "content": question})
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    text = _render(lm, template, messages)
    if answers:
        _, marker, text = text.partition(_ANSWER)
        if not marker:
            raise UsageError("the chat template leaves out earlier answers: pass another --prompt-template FILE.jinja")
    # Chat templates contain the special tokens.
    return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])


def special_tokens(lm: LanguageModel) -> set[int]:
    """Return the ids of the special tokens of the tokenizer."""
    added = lm.tokenizer.added_tokens_decoder.items()
    return {*lm.tokenizer.all_special_ids, *(token for token, value in added if value.special)}


def _render(lm: LanguageModel, template: PromptTemplate, messages: list[dict[str, str]]) -> str:
    try:
        return str(
            lm.tokenizer.apply_chat_template(
                messages, chat_template=template.text, add_generation_prompt=True, tokenize=False
            )
        )
    except TemplateError as error:
        advice = "pass --instruction '' if it has no system message, or another --prompt-template"
        raise UsageError(f"the chat template fails: {str(error).splitlines()[0]}; {advice}") from None
