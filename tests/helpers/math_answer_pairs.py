r"""Pairs of answers of which it is known by how they were made whether they are the same.

    .venv/bin/python tests/helpers/math_answer_pairs.py 20000     # what math_agreement says

Each kind draws a quantity, then either two spellings of it, or a spelling of it and one of another quantity
that is near: the prefix in the other case, the bracket of the other kind, the decimal cut off. Nothing here
reads an answer, and nothing is taken from the code under test but the function that is asked.
"""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from stateset_agents.answers.agreement import Form, math_agreement

TIMES, MINUS, INFINITY, ROOT, PI = "\u00d7", "\u2212", "\u221e", "\u221a", "\u03c0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An answer and the truth, and whether a mathematician takes them for the same."""

    kind: str
    given: str
    truth: str
    is_same: bool
    form: Form = "value"


Draw = Callable[[random.Random, bool], tuple[str, str]]
"""Whether the two are the same -> the answer and the truth."""


def superscript(number: int) -> str:
    signs = dict(zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True))
    return "".join(signs[digit] for digit in str(number))


def full_width(text: str) -> str:
    return "".join(chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign for sign in text)


def italic(letter: str) -> str:
    return chr(0x1D44E + ord(letter) - ord("a"))


def two(
    rng: random.Random, spell: Callable[..., Sequence[str]], quantity: tuple, other: tuple
) -> tuple[str, str]:
    """A spelling of each; of one quantity two different ones where it has them."""
    first = list(spell(*quantity))
    given = rng.choice(first)
    if quantity == other:
        rest = [text for text in first if text != given] or first
        return given, rng.choice(rest)
    return given, rng.choice(list(spell(*other)))


# ------------------------------------------------------------------------------- numbers


def whole(value: int) -> list[str]:
    sign, size = "-" * (value < 0), abs(value)
    texts = [str(value), f"{value}.0", rf"\boxed{{{value}}}", f"${value}$", f"x = {value}", f"**{value}**"]
    texts += [f"{value}.", full_width(str(value)), sign.replace("-", MINUS) + str(size)]
    if size >= 1000:
        texts += [f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", r"\,")]
        texts += [f"{value:,}".replace(",", space) for space in ("\u00a0", "\u202f", "\u2009")]
    return texts


def draw_whole(rng: random.Random, same: bool) -> tuple[str, str]:
    value = rng.choice([rng.randint(-99, 99), rng.randint(1000, 9_999_999)])
    near = rng.choice([value + 1, value - 10, value * 10, value + 1000, -value - 1])
    return two(rng, whole, (value,), (value if same else near + (near == value),))


def draw_decimal(rng: random.Random, same: bool) -> tuple[str, str]:
    digits = rng.randint(1, 4)
    size = rng.randint(1, 10**digits * 50) * 10 + rng.randint(1, 9)

    def spell(number: int) -> list[str]:
        text = f"{number // 10 ** (digits + 1)}.{number % 10 ** (digits + 1):0{digits + 1}d}"
        plain = Fraction(number, 10 ** (digits + 1))
        return [text, text + "0", f"${text}$", full_width(text), f"{plain.numerator}/{plain.denominator}"]

    return two(rng, spell, (size,), (size if same else size + rng.choice([1, 2, 9, 10**digits]),))


VULGAR = {
    (1, 2): "½",
    (1, 3): "⅓",
    (2, 3): "⅔",
    (1, 4): "¼",
    (3, 4): "¾",
    (1, 5): "⅕",
    (3, 8): "⅜",
    (5, 6): "⅚",
}


def fraction(value: Fraction) -> list[str]:
    above, below, sign = abs(value.numerator), value.denominator, "-" * (value < 0)
    texts = [
        f"{sign}{above}/{below}",
        rf"{sign}\frac{{{above}}}{{{below}}}",
        rf"{sign}\dfrac{{{above}}}{{{below}}}",
    ]
    texts += [
        f"{sign}{3 * above}/{3 * below}",
        rf"\frac{{{sign}{above}}}{{{below}}}",
        f"{sign}{above}\u2044{below}",
    ]
    if above < 10 and below < 10:
        texts.append(rf"{sign}\frac{above}{below}")
    part = (above % below, below)
    if above > below:
        texts += [
            f"{sign}{above // below} {part[0]}/{below}",
            rf"{sign}{above // below}\frac{{{part[0]}}}{{{below}}}",
        ]
    if part in VULGAR:
        texts.append(f"{sign}{above // below or ''}{VULGAR[part]}")
    return texts


def draw_fraction(rng: random.Random, same: bool) -> tuple[str, str]:
    if rng.random() < 0.4:
        above, below = rng.choice(list(VULGAR))
        value = Fraction(above, below) + rng.randint(0, 5)
    else:
        below = rng.randint(2, 30)
        value = Fraction(below * rng.randint(0, 4) + rng.randint(1, below - 1), below)
    value *= rng.choice([1, 1, -1])
    others = [1 / value, -value, value + 1, Fraction(value.numerator, value.denominator + 1)]
    other = (
        value
        if same
        else rng.choice([one for one in others if one != value and one.denominator > 1] or [value + 1])
    )
    return two(rng, fraction, (value,), (other,))


def draw_repeating(rng: random.Random, same: bool) -> tuple[str, str]:
    head = rng.choice(["", "", str(rng.randint(1, 9))])
    size = rng.choice([1, 1, 2, 3])
    block = f"{rng.randint(1, 10**size - 2):0{size}d}"
    if len(set(block)) == 1:  # 99 and 0 are other numbers, 33 is 3
        block = rng.choice("12345678") if size == 1 or block[0] in "09" else block[0]
    lead = rng.randint(0, 3)

    def spell(lead: int, head: str, block: str) -> list[str]:
        repeats = 3 if len(block) == 1 else 2
        digits = f"{lead}.{head}"
        value = (
            lead
            + Fraction(int(head or 0), 10 ** len(head))
            + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(head))
        )
        barred = "".join(digit + "\u0305" for digit in block)
        texts = [
            rf"{digits}\overline{{{block}}}",
            f"{digits}{block * repeats}...",
            f"{digits}{block * repeats}\u2026",
        ]
        texts += [
            f"{value.numerator}/{value.denominator}",
            digits + barred,
            f"{digits}({block})",
            rf"{digits}{block * repeats}\ldots",
        ]
        if len(block) == 1:
            texts.append(rf"{digits}\dot{{{block}}}")
        return texts if value.denominator > 1 else texts[:3]

    if same:
        return two(rng, spell, (lead, head, block), (lead, head, block))
    cut = f"{lead}.{head}{block * rng.randint(2, 5)}"
    others = [cut, f"{lead}.{head}{block}", *spell(lead + 1, head, block), *spell(lead, head + "0", block)]
    pair = [rng.choice(spell(lead, head, block)), rng.choice(others)]
    rng.shuffle(pair)
    return pair[0], pair[1]


def draw_scientific(rng: random.Random, same: bool) -> tuple[str, str]:
    size = f"{rng.randint(1, 9)}" + (f".{rng.randint(1, 99)}".rstrip("0") if rng.random() < 0.6 else "")
    power = rng.choice([-9, -6, -5, -4, -3, -2, 2, 3, 4, 5, 6, 8, 9, 12])

    def spell(size: str, power: int) -> list[str]:
        texts = [
            rf"{size} \times 10^{{{power}}}",
            rf"{size} \cdot 10^{{{power}}}",
            f"{size}e{power}",
            f"{size}E{power}",
        ]
        texts += [
            f"{size} {TIMES} 10{superscript(power)}",
            f"{size}·10{superscript(power)}",
            f"{size} * 10^{power}",
        ]
        texts += [f"{size} x 10^{power}", rf"{size}\times10^{{{power}}}", f"{size}{TIMES}10^({power})"]
        value = Fraction(size) * Fraction(10) ** power
        texts.append(f"{int(value):,}" if value.denominator == 1 else f"{float(value):.14f}".rstrip("0"))
        return texts

    others = [
        (size, power + 1),
        (size, -power),
        (str(Fraction(size) + 1 if "." not in size else size + "1"), power),
    ]
    return two(rng, spell, (size, power), (size, power) if same else rng.choice(others))


def draw_power_of_ten(rng: random.Random, same: bool) -> tuple[str, str]:
    power = rng.choice([-8, -6, -4, -3, -2, 2, 3, 5, 6, 9])

    def spell(power: int) -> list[str]:
        value = Fraction(10) ** power
        digits = f"{value}" if power > 0 else f"0.{'0' * (-power - 1)}1"
        return [
            f"10^{{{power}}}",
            f"10{superscript(power)}",
            digits,
            f"1e{power}",
            rf"1 \times 10^{{{power}}}",
        ]

    return two(rng, spell, (power,), (power if same else rng.choice([-power, power + 1, power - 1]),))


SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def draw_scale(rng: random.Random, same: bool) -> tuple[str, str]:
    size = rng.choice([str(rng.randint(1, 99)), f"{rng.randint(1, 9)}.{rng.randint(1, 9)}"])
    name = rng.choice(list(SCALES))
    mark = rng.choice(["", "$"])

    def spell(size: str, name: str) -> list[str]:
        value = int(Fraction(size) * 10 ** SCALES.get(name, 0))
        if mark:
            return [
                f"${size} {name}",
                f"{size} {name} dollars",
                f"${value:,}",
                rf"\${value:,}",
                f"{value} USD",
            ]
        return [f"{size} {name}", rf"{size}\text{{ {name}}}", f"{value:,}", str(value), f"{size}\u00a0{name}"]

    if same:
        return two(rng, spell, (size, name), (size, name))
    others = [next(other for other in SCALES if other != name), name]
    other = spell(size, others[0]) if rng.random() < 0.5 else [mark + size]
    pair = [rng.choice(spell(size, name)), rng.choice(other)]
    return pair[0], pair[1]


# ----------------------------------------------------------------------------------- units

PREFIXES = {
    "k": "kilo",
    "m": "milli",
    "M": "mega",
    "c": "centi",
    "G": "giga",
    "n": "nano",
    "µ": "micro",
    "": "",
}
SI = {
    "m": ("meter", "meters", "metre", "metres"), "g": ("gram", "grams"), "s": ("second", "seconds"),
    "J": ("joule", "joules"), "W": ("watt", "watts"), "N": ("newton", "newtons"),
    "V": ("volt", "volts"), "L": ("liter", "liters", "litre"), "Hz": ("hertz",), "Pa": ("pascal", "pascals"),
    "A": ("ampere", "amperes"),
}  # fmt: skip
PLAIN = {
    "h": ("hour", "hours", "hr", "hrs"), "min": ("minute", "minutes", "mins"), "ft": ("foot", "feet"),
    "lb": ("pounds", "lbs"), "mi": ("mile", "miles"), "in": ("inch", "inches"), "yd": ("yard", "yards"),
    "mph": ("miles per hour", "mi/h"),
    "km/h": ("kilometers per hour", "kph", "km h^{-1}"), "kWh": ("kilowatt hours", "kilowatt-hours"),
}  # fmt: skip


def si_names(prefix: str, symbol: str) -> tuple[list[str], list[str]]:
    return [prefix + symbol], [PREFIXES[prefix] + name for name in SI[symbol]]


def with_unit(value: str, symbols: Sequence[str], names: Sequence[str]) -> list[str]:
    texts = [f"{value} {name}" for name in names]
    for symbol in symbols:
        texts += [
            f"{value} {symbol}",
            rf"{value}\text{{ {symbol}}}",
            rf"{value} \text{{{symbol}}}",
            f"{value}{symbol}",
        ]
        texts += [
            rf"{value}\,\mathrm{{{symbol}}}",
            rf"{value} \mathrm{{~{symbol}}}",
            f"{value}\u00a0{symbol}",
        ]
        texts += [rf"{value}~\text{{{symbol}}}", f"${value}$ {symbol}"][:1]
    return texts


def draw_unit(rng: random.Random, same: bool) -> tuple[str, str]:
    value = str(rng.randint(2, 90))
    if rng.random() < 0.3:
        symbol = rng.choice(list(PLAIN))
        first = with_unit(value, [symbol], PLAIN[symbol])
        others = [
            text for other in PLAIN if other != symbol for text in with_unit(value, [other], PLAIN[other])
        ]
    else:
        prefix, symbol = rng.choice(list(PREFIXES)), rng.choice(list(SI))
        first = with_unit(value, *si_names(prefix, symbol))
        others = [
            text
            for other in PREFIXES
            for unit in SI
            if (other, unit) != (prefix, symbol) and (other == prefix or unit == symbol)
            for text in with_unit(value, *si_names(other, unit))
        ]
        others += with_unit(str(int(value) + 1), *si_names(prefix, symbol))
        if prefix == "k":  # nothing is converted
            others += with_unit(f"{value}000", *si_names("", symbol)) * 3
    others += [value] * 3
    if same:
        given, truth = rng.sample(first, 2)
        return given, truth
    truth, given = rng.choice(first), rng.choice(others)
    return given, truth


def draw_case(rng: random.Random, same: bool) -> tuple[str, str]:
    """The same letters, of which one is a capital in one unit and not in the other."""
    value = str(rng.randint(2, 90))
    left, right = rng.choice(
        [
            (("mW", "milliwatts"), ("MW", "megawatts")), (("mg", "milligrams"), ("Mg", "megagrams")),
            (("MB", "megabytes"), ("Mb", "megabits")), (("GB", "gigabytes"), ("Gb", "gigabits")),
            (("mHz", "millihertz"), ("MHz", "megahertz")), (("mJ", "millijoules"), ("MJ", "megajoules")),
            (("mPa", "millipascals"), ("MPa", "megapascals")), (("kB", "kilobytes"), ("kb", "kilobits")),
            (("mV", "millivolts"), ("MV", "megavolts")), (("mL", "milliliters"), ("ML", "megaliters")),
        ]
    )  # fmt: skip
    first, second = (with_unit(value, [symbol], [name]) for symbol, name in (left, right))
    if same:
        given, truth = rng.sample(first, 2)
        return given, truth
    pair = [rng.choice(first), rng.choice(second)]
    rng.shuffle(pair)
    return pair[0], pair[1]


def draw_power_of_unit(rng: random.Random, same: bool) -> tuple[str, str]:
    value = str(rng.randint(2, 90))
    lengths = {
        "m": "meter",
        "cm": "centimeter",
        "km": "kilometer",
        "ft": "foot",
        "in": "inch",
        "mm": "millimeter",
    }

    def spell(symbol: str, power: int) -> list[str]:
        word = {2: "square", 3: "cubic"}[power]
        plural = {"foot": "feet", "inch": "inches"}.get(lengths[symbol], lengths[symbol] + "s")
        texts = [
            f"{value} {symbol}^{power}",
            f"{value} {symbol}{superscript(power)}",
            rf"{value}\text{{ {symbol}}}^{power}",
        ]
        texts += [
            f"{value} {word} {plural}",
            f"{value} {word} {symbol}",
            rf"{value}\ \mathrm{{{symbol}}}^{{{power}}}",
        ]
        return [
            *texts,
            f"{value} {'sq' if power == 2 else 'cu'} {symbol}",
            rf"{value} \text{{ {word} {plural}}}",
        ]

    symbol, power = rng.choice(list(lengths)), rng.choice([2, 3])
    other = rng.choice([(next(unit for unit in lengths if unit != symbol), power), (symbol, 5 - power)])
    return two(rng, spell, (symbol, power), (symbol, power) if same else other)


def draw_rate(rng: random.Random, same: bool) -> tuple[str, str]:
    value = str(rng.randint(2, 90))
    things = {"m": "meters", "km": "kilometers", "g": "grams", "L": "liters", "J": "joules", "mol": "moles"}
    times = {"s": "second", "h": "hour", "min": "minute", "kg": "kilogram"}

    def spell(above: str, below: str) -> list[str]:
        texts = [
            f"{value} {above}/{below}",
            rf"{value}\text{{ {above}/{below}}}",
            f"{value} {things[above]} per {times[below]}",
        ]
        texts += [
            rf"{value} \frac{{\text{{{above}}}}}{{\text{{{below}}}}}",
            rf"{value}\,\text{{{above}}}/\text{{{below}}}",
        ]
        texts += [
            rf"{value}\,\mathrm{{{above}\,{below}^{{-1}}}}",
            f"{value} {above}·{below}⁻¹",
            f"{value} {above} / {below}",
        ]
        return [
            *texts,
            rf"{value} \text{{{above}}} \cdot \text{{{below}}}^{{-1}}",
            f"{value} {above} per {times[below]}",
        ]

    above, below = rng.choice(list(things)), rng.choice(list(times))
    first = spell(above, below)
    if same:
        given, truth = rng.sample(first, 2)
        return given, truth
    others = [
        f"{value} {below}/{above}",
        f"{value} {above}",
        f"{value} {above} {below}",
        f"{value} {above}/{below}^2",
        value,
    ]
    others += [text for unit in times if unit != below for text in spell(above, unit)[:3]]
    return rng.choice(others), rng.choice(first)


def draw_temperature(rng: random.Random, same: bool) -> tuple[str, str]:
    value = str(rng.randint(-20, 90))

    def spell(letter: str) -> list[str]:
        name = {"C": "Celsius", "F": "Fahrenheit"}[letter]
        texts = [
            f"{value} °{letter}",
            f"{value}°{letter}",
            rf"{value}^\circ {letter}",
            rf"{value}^{{\circ}}\text{{{letter}}}",
        ]
        sign = {"C": "℃", "F": "℉"}[letter]
        return [*texts, f"{value} degrees {name}", f"{value}{sign}", rf"{value}\,^\circ\mathrm{{{letter}}}"]

    if same:
        return two(rng, spell, ("C",), ("C",))
    other = rng.choice([*spell("F"), f"{value}°", f"{value} degrees", value])
    return other, rng.choice(spell("C"))


def draw_angle(rng: random.Random, same: bool) -> tuple[str, str]:
    value = rng.randint(5, 180)

    def spell(value: int) -> list[str]:
        return [
            f"{value}°",
            rf"{value}^\circ",
            rf"{value}^{{\circ}}",
            f"{value} degrees",
            f"{value}º",
            rf"{value}\degree",
        ]

    return two(rng, spell, (value,), (value if same else value + rng.choice([1, -2, 90]),))


def draw_money(rng: random.Random, same: bool) -> tuple[str, str]:
    value = rng.choice([str(rng.randint(1, 900)), f"{rng.randint(1, 90)}.{rng.randint(10, 99)}"])
    signs = {"$": ["dollars", "USD"], "€": ["euros", "EUR"], "£": ["GBP", "pounds"]}

    def spell(sign: str, value: str) -> list[str]:
        texts = [
            f"{sign}{value}",
            *(f"{value} {name}" for name in signs[sign]),
            f"{value}{sign}",
            f"{sign} {value}",
        ]
        return (
            [*texts, rf"\{sign}{value}", rf"\${value}"] if sign == "$" else [*texts, full_width(value) + sign]
        )

    sign = rng.choice(list(signs))
    if same:
        return two(rng, spell, (sign, value), (sign, value))
    other = rng.choice([one for one in signs if one != sign])
    given = rng.choice([*spell(other, value), value, *spell(sign, value + "1")])
    return given, rng.choice(spell(sign, value))


def draw_percent(rng: random.Random, same: bool) -> tuple[str, str]:
    value = rng.choice([str(rng.randint(1, 100)), f"{rng.randint(1, 90)}.{rng.randint(1, 9)}"])
    texts = [
        f"{value}%",
        rf"{value}\%",
        f"{value} %",
        f"{value} percent",
        rf"{value}\,\%",
        f"{value}\uff05",
        f"{value} per cent",
    ]
    if same:
        given, truth = rng.sample(texts, 2)
        return given, truth
    pair = [
        rng.choice(texts),
        rng.choice([value, f"{float(value) / 100:.4f}", f"{value} degrees", f"{value}1%"]),
    ]
    rng.shuffle(pair)
    return pair[0], pair[1]


def draw_bare(rng: random.Random, same: bool) -> tuple[str, str]:
    """The truth is a number alone: a unit may stand behind the answer, and no word that changes it."""
    value = str(rng.randint(2, 900))
    right = [
        "km",
        r"\text{ cm}",
        "hours",
        "dollars",
        "m/s",
        "square cm",
        r"\text{ m}^2",
        "m",
        r"\text{ g}",
        "km/h",
        "pounds",
    ]
    wrong = [
        "million",
        "%",
        "thousand",
        r"\%",
        "dozen",
        "percent",
        r"\text{ billion}",
        "x",
        "k",
        "hundred",
        "pairs",
    ]
    return f"{value} {rng.choice(right if same else wrong)}", value


# ------------------------------------------------------------------- sets, intervals, relations


def spaced(rng: random.Random, text: str) -> str:
    return text.replace(", ", rng.choice([",", ", ", r",\ ", " , "]))


def draw_interval(rng: random.Random, same: bool) -> tuple[str, str]:
    low, high = sorted(rng.sample(range(-20, 21), 2))
    left, right = rng.choice("(["), rng.choice(")]")
    is_open = rng.random() < 0.4

    def spell(left: str, low: int, high: int, right: str) -> list[str]:
        ends = [str(low), str(high)]
        if is_open:
            tops = [r"\infty", INFINITY, r"+\infty", "+" + INFINITY]
            return [f"{left}{low}, {top})" for top in tops] + [
                rf"\left{left}{low}, {top}\right)" for top in tops[:2]
            ]
        plain = f"{left}{ends[0]}, {ends[1]}{right}"
        return [
            plain,
            rf"\left{left}{ends[0]}, {ends[1]}\right{right}",
            rf"x \in {plain}",
            plain.replace("-", MINUS),
        ]

    quantity = (left, low, high, right)
    flipped = ({"(": "[", "[": "("}[left], low, high, right)
    others = [flipped, (left, low - 1, high, right)]
    if not is_open:
        others += [(left, low, high + 1, right), (left, low, high, {")": "]", "]": ")"}[right])]
    given, truth = two(rng, spell, quantity, quantity if same else rng.choice(others))
    return spaced(rng, given), truth


def draw_union(rng: random.Random, same: bool) -> tuple[str, str]:
    ends = sorted(rng.sample(range(-20, 21), 4))
    shown = list(ends)
    if not same:
        shown[rng.randrange(4)] += 50
    parts = [f"({shown[0]}, {shown[1]})", f"[{shown[2]}, {shown[3]}]"]
    truth = rf"({ends[0]}, {ends[1]}) \cup [{ends[2]}, {ends[3]}]"
    if rng.random() < 0.5:
        parts.reverse()
    return spaced(rng, rng.choice([r" \cup ", " \u222a ", r"\cup"]).join(parts)), truth


def draw_inequality(rng: random.Random, same: bool) -> tuple[str, str]:
    low, high = sorted(rng.sample(range(-20, 21), 2))
    signs = [rng.choice("<≤"), rng.choice("<≤")]
    is_chain = rng.random() < 0.6

    def spell(low: int, signs: list[str], high: int) -> str:
        latex = [
            rng.choice([sign] if sign == "<" else ["≤", r"\le ", r"\leq ", r"\leqslant "]) for sign in signs
        ]
        gap = rng.choice(["", " "])
        if rng.random() < 0.3:
            back = [{"<": ">", "≤": rng.choice(["≥", r"\ge ", r"\geq "])}[sign] for sign in reversed(signs)]
            parts = [str(high), back[0], "x", back[1], str(low)] if is_chain else [str(high), back[0], "x"]
        else:
            parts = [str(low), latex[0], "x", latex[1], str(high)] if is_chain else ["x", latex[1], str(high)]
        return gap.join(parts)

    truth = spell(low, signs, high)
    if same:
        return spell(low, signs, high), truth
    change = rng.choice(["high", "sign", "turn"])
    if change == "high":
        return spell(low, signs, high + 1), truth
    if change == "sign":
        return spell(low, [signs[0], {"<": "≤", "≤": "<"}[signs[1]]], high), truth
    return f"x > {high}" if not is_chain else f"x < {high}", truth


def draw_set(rng: random.Random, same: bool) -> tuple[str, str]:
    items = rng.sample(range(-30, 31), rng.randint(2, 4))
    shown = list(items)
    if not same:
        change = rng.choice(["less", "more", "other"])
        if change == "less":
            shown.pop()
        else:
            shown[0:0] = [99] if change == "more" else []
            shown[0] = 99
    rng.shuffle(shown)
    texts = [str(item) for item in shown]
    wraps = [rf"\{{{', '.join(texts)}\}}", f"{{{', '.join(texts)}}}", ", ".join(texts), "; ".join(texts)]
    wraps += [
        rf"\left\{{{', '.join(texts)}\right\}}",
        f"{', '.join(texts[:-1])} and {texts[-1]}".removeprefix(" and "),
    ]
    if len(shown) == 1:
        wraps = [rf"\{{{texts[0]}\}}", texts[0]]
    return spaced(rng, rng.choice(wraps)), rng.choice(
        [rf"\{{{', '.join(map(str, items))}\}}", ", ".join(map(str, items))]
    )


def draw_tuple(rng: random.Random, same: bool) -> tuple[str, str]:
    items = rng.sample(range(-30, 31), rng.randint(2, 3))

    def spell(*items: int) -> list[str]:
        plain = f"({', '.join(map(str, items))})"
        return [
            plain,
            rf"\left{plain[:-1]}\right)",
            full_width(plain).replace("\u3000", " "),
            plain.replace("-", MINUS),
        ]

    other = rng.choice([items[::-1], [items[0] + 1, *items[1:]], [*items, 1]])
    given, truth = two(rng, spell, tuple(items), tuple(items) if same else tuple(other))
    return spaced(rng, given), truth


def draw_matrix(rng: random.Random, same: bool) -> tuple[str, str]:
    cells = [rng.randint(-9, 9) for _ in range(4)]

    def spell(name: str, a: int, b: int, c: int, d: int) -> str:
        gap = rng.choice(["", " "])
        return rf"\begin{{{name}}}{gap}{a}{gap}&{gap}{b} \\ {c}{gap}&{gap}{d}{gap}\end{{{name}}}"

    name = rng.choice(["pmatrix", "bmatrix"])
    truth = spell(name, *cells)
    if same:
        return spell(rng.choice(["pmatrix", "bmatrix", "matrix"]), *cells), truth
    changed = [cells[0] + 1, *cells[1:]]
    return rng.choice([spell("vmatrix", *cells), spell("Vmatrix", *cells), spell(name, *changed)]), truth


# -------------------------------------------------------------------------------- expressions


def draw_root(rng: random.Random, same: bool) -> tuple[str, str]:
    size, inside = rng.randint(2, 12), rng.choice([2, 3, 5, 6, 7, 10])

    def spell(size: int, inside: int) -> list[str]:
        texts = [
            rf"{size}\sqrt{{{inside}}}",
            f"{size}{ROOT}{inside}",
            f"{size}*sqrt({inside})",
            rf"\sqrt{{{inside}}} \cdot {size}",
        ]
        return [*texts, rf"{size} \sqrt {{{inside}}}", f"x = {size}{ROOT}{inside}", f"{size}{ROOT}({inside})"]

    other = rng.choice([(size + 1, inside), (size, inside + 1 if inside != 3 else 11)])
    return two(rng, spell, (size, inside), (size, inside) if same else other)


def draw_pi(rng: random.Random, same: bool) -> tuple[str, str]:
    above, below = rng.randint(2, 12), rng.choice([1, 1, 13, 17])

    def spell(above: int, below: int) -> list[str]:
        if below == 1:
            return [
                rf"{above}\pi",
                f"{above}{PI}",
                f"{above}*pi",
                f"{above} {PI}",
                rf"\pi \cdot {above}",
                f"{above}\U0001d70b",
            ]
        texts = [
            rf"\frac{{{above}\pi}}{{{below}}}",
            f"{above}{PI}/{below}",
            rf"\frac{{{above}}}{{{below}}}\pi",
        ]
        return [*texts, f"{above}pi/{below}", rf"{above}\pi/{below}"]

    return two(rng, spell, (above, below), (above, below) if same else (above + 1, below))


def draw_polynomial(rng: random.Random, same: bool) -> tuple[str, str]:
    powers = sorted(rng.sample(range(1, 13), rng.randint(2, 3)), reverse=True)
    terms = [(rng.randint(2, 9), power) for power in powers]

    def spell(terms: list[tuple[int, int]]) -> str:
        order = rng.sample(terms, len(terms))
        style = rng.choice(["latex", "unicode", "italic", "plain"])
        x = italic("x") if style == "italic" else "x"
        written = []
        for size, power in order:
            exponent = (
                superscript(power)
                if style in ("unicode", "italic")
                else f"^{{{power}}}"
                if style == "latex"
                else f"^{power}"
            )
            written.append(f"{size}{x}{exponent if power > 1 else ''}")
        return " + ".join(written)

    truth = spell(terms)
    if not same:
        size, power = terms[0]
        terms = [rng.choice([(size + 1, power), (size, power + 1)]), *terms[1:]]
    return spell(terms), truth


def draw_greek(rng: random.Random, same: bool) -> tuple[str, str]:
    names = {
        "θ": r"\theta",
        "\u03b1": r"\alpha",
        "β": r"\beta",
        "λ": r"\lambda",
        "ω": r"\omega",
        "Δ": r"\Delta",
    }
    size, letter = rng.randint(2, 90), rng.choice(list(names))

    def spell(size: int, letter: str) -> list[str]:
        return [f"{size}{letter}", f"{size}{names[letter]}", f"{size} {names[letter]}", f"{size}*{letter}"]

    other = (size, rng.choice([one for one in names if one != letter]))
    return two(
        rng, spell, (size, letter), (size, letter) if same else rng.choice([other, (size + 1, letter)])
    )


def draw_complex(rng: random.Random, same: bool) -> tuple[str, str]:
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    real, imaginary = a * c - b * d, a * d + b * c
    truth = rng.choice(
        [f"{real}+{imaginary}i", f"{imaginary}i + {real}" if real > 0 else f"{imaginary}i - {-real}"]
    )
    if not same:
        real, imaginary = rng.choice(
            [(real + 1, imaginary), (real, imaginary + 1), (a * c + b * d, imaginary)]
        )
    if rng.random() < 0.5:
        return f"{real}+{imaginary}i", truth
    return (f"({a}+{b}i)({c}+{d}i)" if same else f"({a}+{b}i)({c}-{d}i)"), truth


def draw_product(rng: random.Random, same: bool) -> tuple[str, str]:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    c = rng.randint(2, 11)
    value = a * b * c + (0 if same else rng.choice([1, -1, a * b * c]))
    texts = [
        f"{a}({b})({c})",
        f"{a}({b * c})",
        f"({a})({b}) * {c}",
        f"{a} * {b} * {c}",
        rf"{a} \times {b * c}",
    ]
    return rng.choice([*texts, f"{a * b * c * 2}/2", f"{a}/{b}*{b * b * c}"]), str(value)


def draw_letters(rng: random.Random, same: bool) -> tuple[str, str]:
    a, b, c = rng.sample("abcdpquvxyz", 3)
    truth = rng.choice(
        [rf"\frac{{{a}{b}}}{{{c}}}", f"{a}*{b}/{c}", f"{a}/{c}*{b}", rf"\frac{{{a}}}{{{c}}} {b}"]
    )
    texts = [f"{a}{b}/{c}", f"{b}*{a}/{c}", f"{a}/{c}*{b}", rf"\frac{{{b}{a}}}{{{c}}}"]
    others = [f"{a}/({b}{c})", rf"\frac{{{c}}}{{{a}{b}}}", f"{a}{c}/{b}", f"{a}*{b}"]
    return rng.choice(texts if same else others), truth


# -------------------------------------------------------------------------------- words, hedges


def draw_words(rng: random.Random, same: bool) -> tuple[str, str]:
    words = [
        "Zürich",
        "café au lait",
        "Málaga",
        "Ångström",
        "São Paulo",
        "naïve Bayes",
        "Tuesday",
        "New York",
        "Gödel",
    ]
    word = rng.choice(words)
    other = word if same else rng.choice([*(one for one in words if one != word), f"not {word}"])
    texts = [
        unicodedata.normalize(form, text)
        for form in ("NFC", "NFD")
        for text in (other, other.lower(), f"{other}.")
    ]
    return rng.choice([*texts, rf"\text{{{other}}}"]), word


def draw_hedge(rng: random.Random, same: bool) -> tuple[str, str]:
    value = rng.randint(2, 900)
    exact = [f"${value}$", f"{value}", f"={value}".replace("=", "x = ")]
    hedges = [
        f"~{value}",
        f"{value}...",
        f"{value}\u2026",
        f"about {value}",
        f"\u2248{value}",
        rf"\approx {value}",
    ]
    hedges += [
        f"{value} or {value + 1}",
        rf"{value} \pm 1",
        f"{value}?",
        f"x \u2248 {value}",
        rf"\sim {value}",
        f"{value}+",
    ]
    hedges += [
        f"> {value}",
        rf"\leq {value}",
        f"{value - 1}\u2013{value}",
        f"{value}-{value + 1}",
        f"not {value}",
        f"{value}..",
    ]
    return rng.choice(exact if same else hedges), str(value)


KINDS: dict[str, tuple[Draw, Form]] = {
    "whole numbers": (draw_whole, "value"),
    "decimals": (draw_decimal, "value"),
    "fractions": (draw_fraction, "value"),
    "repeating decimals": (draw_repeating, "value"),
    "scientific notation": (draw_scientific, "value"),
    "powers of ten": (draw_power_of_ten, "value"),
    "3 million": (draw_scale, "value"),
    "prefixes": (draw_unit, "value"),
    "case": (draw_case, "value"),
    "areas and volumes": (draw_power_of_unit, "value"),
    "rates": (draw_rate, "value"),
    "temperatures": (draw_temperature, "value"),
    "angles": (draw_angle, "value"),
    "money": (draw_money, "value"),
    "percent": (draw_percent, "value"),
    "a unit too many": (draw_bare, "value"),
    "intervals": (draw_interval, "value"),
    "unions": (draw_union, "value"),
    "inequalities": (draw_inequality, "value"),
    "sets and lists": (draw_set, "value"),
    "tuples": (draw_tuple, "value"),
    "matrices": (draw_matrix, "value"),
    "roots": (draw_root, "value"),
    "multiples of pi": (draw_pi, "value"),
    "polynomials": (draw_polynomial, "value"),
    "Greek letters": (draw_greek, "value"),
    "complex numbers": (draw_complex, "expression"),
    "products": (draw_product, "expression"),
    "quotients of letters": (draw_letters, "expression"),
    "words": (draw_words, "value"),
    "hedges": (draw_hedge, "value"),
}


def pairs(number: int, seed: int) -> Iterator[Pair]:
    """As many of each kind, half of them the same."""
    names = list(KINDS)
    for place in range(number):
        kind = names[place % len(names)]
        draw, form = KINDS[kind]
        rng = random.Random(f"{seed} {place}")
        is_same = (place // len(names)) % 2 == 0
        given, truth = draw(rng, is_same)
        yield Pair(kind=kind, given=given, truth=truth, is_same=is_same, form=form)


@dataclass(slots=True)
class Score:
    """What was said of the pairs of one kind."""

    same: int = 0
    different: int = 0
    false_refusals: int = 0
    false_accepts: int = 0


def score(drawn: Iterator[Pair]) -> tuple[dict[str, Score], list[Pair]]:
    """By kind, and the pairs that were judged wrong; a truth that is not its own answer counts as refused."""
    scores = {kind: Score() for kind in KINDS}
    wrong: list[Pair] = []
    for pair in drawn:
        row = scores[pair.kind]
        said = math_agreement(pair.given, pair.truth, form=pair.form)
        is_own = math_agreement(pair.truth, pair.truth, form=pair.form)
        row.same += pair.is_same
        row.different += not pair.is_same
        row.false_refusals += pair.is_same and not (said and is_own)
        row.false_accepts += said and not pair.is_same
        if said != pair.is_same or (pair.is_same and not is_own):
            wrong.append(pair)
    return scores, wrong


FAMILIES = {
    "numbers": list(KINDS)[:7],
    "units": list(KINDS)[7:16],
    "sets and relations": list(KINDS)[16:22],
    "expressions": list(KINDS)[22:29],
    "words and hedges": list(KINDS)[29:],
}
"""Rows of the table in docs/evidence/answer-pairs.md."""


def main(number: int, seed: int) -> None:
    scores, wrong = score(pairs(number, seed))
    print("| pairs of | same | refused | different | accepted |\n|---|---|---|---|---|")
    for family, kinds in {**FAMILIES, "all": list(KINDS)}.items():
        rows = [scores[kind] for kind in kinds]
        same, different = sum(row.same for row in rows), sum(row.different for row in rows)
        refused, accepted = sum(row.false_refusals for row in rows), sum(row.false_accepts for row in rows)
        listed = "" if family == "all" else f": {', '.join(kinds)}"
        print(f"| {family}{listed} | {same} | {refused} | {different} | {accepted} |")
    for pair in wrong[:60]:
        print(
            f"{pair.kind}: {pair.given!r} for {pair.truth!r} is {'right' if pair.is_same else 'wrong'}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
