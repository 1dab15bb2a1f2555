"""Takes personal text out of conversations, by rules, on this machine: a listed set of kinds and no more.

    secret    private keys, API keys, tokens, passwords that are named as such, credentials in addresses
    card      numbers of payment cards: 13 to 19 digits whose check digit is right (Luhn, ISO/IEC 7812-1)
    iban      numbers of bank accounts whose check digits are right (ISO 13616, modulo 97)
    mail      mail addresses
    ssn       social security numbers of the USA, as 123-45-6789
    phone     telephone numbers: with +, with a leading 0, or grouped as 555-123-4567
    address   IP addresses, version 4 and 6

Names, postal addresses, dates of birth and what else somebody tells of himself have no such form: they stay.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stateset_agents.claims.english import PatternFile, Patterns

_FILE = PatternFile(Path(__file__).with_suffix(".yaml"))
_SECRETS = tuple(_FILE.patterns("secrets").values())
_KINDS = Patterns("kinds", _FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redacted:
    """A text without personal text."""

    text: str
    counts: Mapping[str, int]
    """Number of replacements of each kind."""


def redact(text: str) -> Redacted:
    """The text with placeholders instead of what `KINDS` names.

    >>> redact("mail ann@example.org, again ann@example.org, or call +49 30 1234567").text
    'mail [mail 1], again [mail 1], or call [phone 1]'
    """
    redactor = Redactor()
    return Redacted(text=redactor.text(text), counts=dict(redactor.counts))


class Redactor:
    """Redacts one conversation: equal texts get the same placeholder in all its messages and calls."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of replacements of each kind."""
        self._placeholders: dict[tuple[str, str], str] = {}

    def text(self, text: str) -> str:
        """The text with placeholders, as `redact` gives it."""
        for kind, rule in _RULES:
            text = rule(text, partial(self._placeholder, kind))
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """A JSON value with all texts in it redacted; a field that is named as a secret goes whole."""
        if (
            name
            and _KINDS.secret_field.fullmatch(name)
            and isinstance(value, str | int | float)
            and value != ""
        ):
            is_gone = isinstance(value, str) and value.startswith("[secret ")
            return value if is_gone else self._placeholder("secret", str(value))
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool | None):
            return value
        if isinstance(value, int):
            text = self.text(str(value))
            return value if text == str(value) else text
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item, str(key)) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.value(item, name) for item in value]
        return value

    def _placeholder(self, kind: str, text: str) -> str:
        self.counts[kind] += 1
        same = re.sub(r"[\W_]", "", text).casefold() if kind in _NUMBERS else text.casefold()
        number = 1 + sum(other == kind for other, _ in self._placeholders)
        return self._placeholders.setdefault((kind, same), f"[{kind} {number}]")


_Replace = Callable[[str], str]


def _secrets(text: str, replace: _Replace) -> str:
    for pattern in _SECRETS:

        def replaced(match: re.Match[str]) -> str:
            if "value" not in match.groupdict():
                return replace(match[0])
            value = match["value"]
            if value.startswith("[secret"):  # taken out already
                return match[0]
            return match[0][: match.start("value") - match.start()] + replace(value)

        text = pattern.sub(replaced, text)
    return text


def _matches(
    pattern: re.Pattern[str], is_one: Callable[[str], bool] = bool
) -> Callable[[str, _Replace], str]:
    def rule(text: str, replace: _Replace) -> str:
        return pattern.sub(lambda match: replace(match[0]) if is_one(match[0]) else match[0], text)

    return rule


def _cards_in(run: str, replace: _Replace) -> str:
    """A run of digits with gaps, without the card numbers in it, also one that other numbers stand beside, as
    its date does; a number begins and ends where a group does."""
    places = [at for at, character in enumerate(run) if character.isdecimal()]
    starts = [n for n, at in enumerate(places) if n == 0 or places[n - 1] < at - 1]
    ends = {n + 1 for n, at in enumerate(places) if n + 1 == len(places) or places[n + 1] > at + 1}
    done, result = 0, ""
    for start in starts:
        if places[start] < done:
            continue
        for length in range(19, 12, -1):
            end = start + length
            if end in ends and _luhn("".join(run[at] for at in places[start:end])):
                result += run[done : places[start]]
                done = places[end - 1] + 1
                result += replace(run[places[start] : done])
                break
    return result + run[done:]


def _luhn(digits: str) -> bool:
    """True if the check digit is right. Every second digit from the right is doubled, and its digits are
    added.

    >>> _luhn("4111111111111111"), _luhn("4111111111111112")
    (True, False)
    """
    numbers = [int(digit) for digit in reversed(digits)]
    total = sum(numbers[::2]) + sum(sum(divmod(2 * number, 10)) for number in numbers[1::2])
    return total % 10 == 0 and any(numbers)


def _ibans(text: str, replace: _Replace) -> str:
    def replaced(match: re.Match[str]) -> str:
        words = match[0]
        for end in range(len(words), 14, -1):  # words in capitals may stand behind it
            if words[end - 1] != " " and words[end : end + 1] in ("", " ") and _is_iban(words[:end]):
                return replace(words[:end]) + words[end:]
        return words

    return _KINDS.iban.sub(replaced, text)


def _is_iban(text: str) -> bool:
    plain = text.replace(" ", "")
    digits = "".join(str(int(character, 36)) for character in plain[4:] + plain[:4])
    return 15 <= len(plain) <= 34 and int(digits) % 97 == 1


def _is_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text) is not None
    except ValueError:
        return False


_RULES: Sequence[tuple[str, Callable[[str, _Replace], str]]] = (
    ("secret", _secrets),
    ("iban", _ibans),
    ("card", lambda text, replace: _KINDS.digits.sub(lambda match: _cards_in(match[0], replace), text)),
    ("mail", _matches(_KINDS.mail)),
    ("ssn", _matches(_KINDS.ssn)),
    (
        "address",
        _matches(_KINDS.ip6, lambda text: text.count(":") > 1 and text != "::" and _is_address(text)),
    ),
    ("address", _matches(_KINDS.ip4, _is_address)),
    ("phone", _matches(_KINDS.phone)),
)
"""Rules in the order of their use: a number that has a check digit is no telephone number."""
_NUMBERS = frozenset({"card", "iban", "phone", "ssn"})
"""Kinds that are equal whatever their gaps."""
KINDS: tuple[str, ...] = tuple(dict.fromkeys(kind for kind, _ in _RULES))
