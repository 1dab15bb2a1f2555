"""Unicode characters of an answer as the ASCII or LaTeX that says the same; `tokens.py` cuts the result.

NFKC alone would change values: it makes `x2` of x² and `41/2` of 4½.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from stateset_agents.types.comparison import nfc

TIMES = "\u00d7"
"""The sign that tells typeset from `*`."""
GREEK = {
    chr(code): unicodedata.name(chr(code)).split()[-1].replace("LAMDA", "LAMBDA").lower()
    for code in range(0x3B1, 0x3CA)
    if code != 0x3C2  # final sigma
} | {"Δ": "Delta", "Ω": "Omega", "Σ": "Sigma", "Γ": "Gamma", "Φ": "Phi", "Θ": "Theta", "Λ": "Lambda"}
"""A letter -> the LaTeX command that writes it."""
_SIGNS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\ufe63", "-"),
    **dict.fromkeys("\u00d7\u2715\u2a2f", TIMES), **dict.fromkeys("·⋅∙•‧", "·"), "\u2217": "*",
    **dict.fromkeys("÷\u2044\u2215", "/"), "\u2236": ":", "\u2223": "|",
    "π": " pi ", "∞": " oo ", "√": " sqrt ", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]",
    "⩽": "≤", "⩾": "≥", "∈": "\\in ", "∅": "\\emptyset ", "∓": "±", "º": "°", "\u2019": "'", "\u2032": "'",
    "\u211d": "\\mathbb{R}", "\u2124": "\\mathbb{Z}", "\u211a": "\\mathbb{Q}", "\u2115": "\\mathbb{N}",
    "\u2102": "\\mathbb{C}",
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad", ""),
}  # fmt: skip
_AS_LETTERS = ("<font>", "<wide>", "<narrow>", "<noBreak>", "<square>", "<compat>", "<small>")
"""Kinds of compatibility characters that are others, drawn differently: full-width digits, ㎞."""
_SCRIPT = re.compile(r"([\^_])\{([^{}]*)\}(?:\1\{([^{}]*)\})")
_OVERLINED = re.compile(r"(?:[0-9]\u0305)+")
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:[\u00a0\u2009\u202f][0-9]{3})+(?![0-9])")
_ROOT = re.compile(r"(\\sqrt\[[34]\])([0-9]+|[a-z])")
_RANGE = re.compile(r"(?<=[0-9])\u2013(?=[0-9])")


@lru_cache(maxsize=4096)
def plain_text(text: str) -> str:
    r"""The text in NFC, with mathematical characters spelled out.

    >>> plain_text("10⁻³ µm²"), plain_text("４½"), plain_text("10\u202f000")
    ('10^{-3} μm^{2}', '4\\frac{1}{2}', '10,000')
    """
    if text.isascii():
        return text
    text = nfc(text)
    text = _OVERLINED.sub(lambda match: rf"\overline{{{match[0][::2]}}}", text)
    text = re.sub(r"([0-9])\u0307", r"\\dot{\1}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", ",", match[0]), text)
    if not _RANGE.search(text):  # that is from 3 to 5, and no difference
        text = text.replace("\u2013", "-")
    text = "".join(map(_spelled, text))
    before = ""
    while before != text:  # ¹² is one exponent
        before, text = text, _SCRIPT.sub(r"\1{\2\3}", text)
    return nfc(_ROOT.sub(r"\1{\2}", text))


@lru_cache(maxsize=4096)
def _spelled(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind, *codes = unicodedata.decomposition(character).split() or [""]
    if not kind.startswith("<"):
        return character
    inner = "".join(_spelled(chr(int(code, 16))) for code in codes)
    match kind:
        case "<fraction>" if not inner.endswith("/"):
            above, _, below = inner.partition("/")
            return rf"\frac{{{above}}}{{{below}}}"
        case "<super>" if character != "ª":
            return f"^{{{inner}}}"
        case "<sub>":
            return f"_{{{inner}}}"
    is_plain = kind in _AS_LETTERS and not (kind == "<compat>" and any(map(str.isdigit, inner)))
    return inner if is_plain else character
