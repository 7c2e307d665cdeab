"""The end of an answer, found while its tokens are generated."""

import re
from collections.abc import Collection
from typing import Any

# A word of three letters or a digit, then a full stop: no initial, no abbreviation, no number with decimals.
_SENTENCE_END = re.compile(r"[^\W\d_]{3,}[\"')\]]*[.!?]$|\d[.!?]$")
# Characters before the last one that decide whether a sentence ends.
_TAIL = 64
# Longest character in UTF-8, in bytes: a character spreads over at most so many tokens.
_MAX_CHARACTER_BYTES = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class AnswerEnd:
    """Finds the end of an answer, given its tokens one after another.

    An answer ends before an end-of-sequence token, before the first token with a new line after some text,
    after the first sentence, or after the last token. A sentence has ended if the text after it begins with white
    space. Each token is decoded a constant number of times, with the few tokens before it.

    Parameters
    ----------
    tokenizer : Any
        A tokenizer of transformers.
    end_tokens : collection of int
        The end-of-sequence tokens.

    Attributes
    ----------
    tokens : list of int
        All tokens up to the one that shows the end; `add` ignores later ones.
    is_known : bool
        Whether the end was found.
    """

    def __init__(self, tokenizer: Any, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._end_tokens = tokenizer, end_tokens
        self.tokens: list[int] = []
        self.is_known = False
        self._length, self._method = 0, "max_tokens"
        # The tokens [_shown:_read] are the context of those from _read on, whose text is not known yet.
        self._shown = self._read = 0
        self._context = ""  # text of the tokens [_shown:_read]
        self._tail = ""
        self._has_text = self._has_newline = False
        self._sentence_length = 0  # number of tokens up to the end of a sentence that no later text confirms yet

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer: those before its end."""
        return self.tokens[: self._length] if self.is_known else self.tokens

    @property
    def method(self) -> str:
        """Kind of the end: "eos", "newline", "sentence" or "max_tokens"."""
        if not self.is_known and self.tokens and self._sentence_length == len(self.tokens):
            return "sentence"
        return self._method

    def add(self, token: int) -> bool:
        """Add a token, and return whether the end of the answer is known."""
        if self.is_known:
            return True
        count = len(self.tokens)
        self.tokens.append(token)
        if token in self._end_tokens:
            return self._end(count, "eos")
        text = self._new_text()
        if not text:
            return False
        if self._sentence_length:
            if text[0] in " \n":
                return self._end(self._sentence_length, "sentence")
            self._sentence_length = 0
        self._has_newline = self._has_newline or "\n" in (text if self._has_text else text.lstrip())
        if self._has_newline and count:
            return self._end(count, "newline")
        self._has_text = self._has_text or not text.isspace()
        self._tail = (self._tail + text)[-_TAIL:]
        if _SENTENCE_END.search(self._tail):
            self._sentence_length = len(self.tokens)
        return False

    def _end(self, length: int, method: str) -> bool:
        self._length, self._method, self.is_known = length, method, True
        return True

    def _new_text(self) -> str:
        """Return the text that the last token completes; empty within a character."""
        decode, count = self._tokenizer.decode, len(self.tokens)
        text = decode(self.tokens[self._shown :])
        if text.endswith(_INCOMPLETE) and count - self._read < _MAX_CHARACTER_BYTES:
            return ""
        new = text[len(self._context) :]
        self._shown, self._read = self._read, count
        self._context = decode(self.tokens[self._shown :])
        return str(new)
