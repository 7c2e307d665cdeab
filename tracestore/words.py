"""Texts of sizes and counts, and the words of an answer."""

import argparse
import re
import string
import unicodedata

_UNITS = {"": 1, "B": 1}
for _k, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_k, f"{_letter}IB": 1024**_k, _letter: 1024**_k}
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 512MiB, 2GiB, 2GB or a plain number, for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"found size {text!r}, expected one like 512MiB, 2GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(count: float) -> str:
    """Return a number of bytes in the largest fitting unit, such as 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 trace" or "2,000 traces"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def squad_words(text: str) -> list[str]:
    """Return the words in lower case without ASCII punctuation and articles.

    `normalize_answer` in the evaluation script of SQuAD (Rajpurkar et al., 2016) joins them with spaces.
    """
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def folded(text: str) -> str:
    """Return a text without what is no difference between texts: blanks, case and forms of characters."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).split()).casefold()


def format_p(value: float | None) -> str:
    """Return a p-value with three decimals, "-" for None."""
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
