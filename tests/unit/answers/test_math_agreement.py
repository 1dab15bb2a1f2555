"""A table of answers, right, wrong and dishonest: no wrong one may be taken for right."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stateset_agents.answers.agreement import MAX_ANSWER, check_truth, math_agreement
from stateset_agents.answers.exact import are_equal
from stateset_agents.answers.expressions import read
from stateset_agents.answers.tokens import Unreadable
from stateset_agents.types.errors import ConfigurationError

EQUAL = [
    *[
        (text, 42)
        for text in ("42", " 42 ", "42.", "42.0", "+42", "0042", "$42$", "$$42$$", r"\(42\)", r"\[42\]")
    ],
    *[
        (text, 42)
        for text in (r"\boxed{42}", r"$\boxed{42}$", r"\fbox{42}", "**42**", "`42`", "(42)", "x = 42")
    ],
    *[
        (text, 42)
        for text in ("$42", r"\$42", "€42", "42 dollars", "42 km", "42°", r"42^\circ", r"42\text{ cm}")
    ],
    *[
        (text, 42)
        for text in ("f(x) = 42", r"\theta = 42", "4.2e1", "42 hours", r"x_1 = 42", "{42}", r"\text{}42")
    ],
    *[(text, -3) for text in ("-3", "\u22123", "\u20133", "-3.0", "x=-3", "(-3)", "-$3", "$-3")],
    *[(text, 1250) for text in ("1250", "1,250", "1{,}250", r"1\,250", r"1,\!250", "1,250.00", "$1,250")],
    (1234567, 1234567),
    ("1,234,567", 1234567),
    *[
        (text, 0.5)
        for text in ("0.5", ".5", "1/2", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", "½")
    ],
    *[(text, "1/2") for text in ("0.5", "2/4", "0.50", r"\frac{2}{4}", "5e-1")],
    *[(text, "-1/2") for text in ("-1/2", r"-\frac{1}{2}", r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5")],
    *[(text, "3/2") for text in ("1 1/2", r"1\frac{1}{2}", r"1\frac12", "1.5", "3/2", "1½")],
    *[(text, "1/3") for text in (r"0.\overline{3}", "1/3", "2/6", r"\frac{1}{3}")],
    (r"0.1\overline{6}", "1/6"),
    ("156", r"12 \times 13"),
    ("0", 0),
    ("-0", 0),
    ("0.1", 0.1),
    ("1e-05", 1e-05),
    ("50%", "50%"),
    (r"50\%", "50%"),
    ("50 percent", r"50\%"),
    ("5 km", "5 kilometers"),
    ("5 hours", r"5\text{ h}"),
    (r"5\text{ cm}^2", "5 cm^2"),
    ("90 degrees", r"90^\circ"),
    ("$18", "18 dollars"),
    ("2ab", "2ab"),
    (r"2\sqrt{3}", r"2\sqrt{3}"),
    (r"\sqrt{3} \cdot 2", r"2\sqrt3"),
    ("2√3", r"2\sqrt{3}"),
    ("2*sqrt(3)", r"2\sqrt{3}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{1}{2}\sqrt{3}"),
    ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac{\pi}{2}", "pi/2"),
    ("2π", r"2\pi"),
    (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
    ("1 + x^2 + 2x", "x^2 + 2x + 1"),
    ("x²+2x+1", "x^2+2x+1"),
    ("y = 2x + 1", "y=1+2x"),
    ("2x + 1", "y=2x+1"),
    (r"-\frac{x}{2}", "-x/2"),
    ("(1, 2)", "(1,2)"),
    ("(1/2, -3)", r"\left(\frac12, -3\right)"),
    ("[1, 2)", r"\left[1,2\right)"),
    (r"(-\infty, 3]", "(-oo, 3]"),
    (r"x \in [1, 2]", "[1,2]"),
    (r"(1,2) \cup (3,4)", r"(3,4)\cup(1,2)"),
    ("x < 3", "x<3"),
    ("3 > x", "x < 3"),
    (r"x \le 3", r"x\leq 3"),
    ("3:4", "3 : 4"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"101_2", "101_2"),
    ("1, 2", "1, 2"),
    ("2, 1", "1, 2"),
    ("1 and 2", "1, 2"),
    ("x = 1 or x = 2", "1, 2"),
    (r"\{2, 1\}", "1,2"),
    ("1, 2", r"\{1,2\}"),
    ("1; 2", [1, 2]),
    ("2,1", [1, 2]),
    ("1, 2, and 3", [1, 2, 3]),
    (r"\pm 3", "3, -3"),
    ("3, -3", r"\pm 3"),
    (r"2 \pm \sqrt{3}", r"2+\sqrt{3}, 2-\sqrt{3}"),
    (r"x = 2 \pm \sqrt{3}", r"2 \pm \sqrt{3}"),
    ("a half", [["1/2", "a half"]]),
    ("0.5", [["1/2", "a half"]]),
    (r"\emptyset", r"\varnothing"),
    ("Tuesday", "tuesday"),
    (r"\text{Tuesday}", "Tuesday"),
    ("Yes.", "yes"),
    ("(B)", "B"),
    (r"\text{(B)}", "(B)"),
    ("New  York", "new york"),
]
EQUAL += [
    *[
        ("5 m/s", text)
        for text in (r"5\text{ m/s}", "5 meters per second", r"5\,\mathrm{m\,s^{-1}}", "5 m·s⁻¹")
    ],
    *[(f"5 {letter}", rf"5\text{{ {letter}}}") for letter in ("m", "s", "g", "h", "J", "N", "W", "L")],
    ("5 m", "5 metres"),
    ("5 s", "5 seconds"),
    ("5 h", "5 hours"),
    ("5 J", "5 joules"),
    ("5 m^2", "5 square meters"),
    ("5 m²", r"5\text{ m}^2"),
    ("-5 m", r"-5\text{ m}"),
    ("5 J/kg", "5 joules per kilogram"),
    (r"5\frac{\text{km}}{\text{h}}", "5 km/h"),
    ("m * 5", "5 m"),
    ("20 °C", r"20^\circ\text{C}"),
    ("5 μm", r"5\ \mu\text{m}"),
    *[("18 square cm", truth) for truth in (18, r"18\text{ cm}^2", "18 cm2")],
    *[("5 pounds", truth) for truth in ("5 lb", "£5")],
    *[
        (text, text)
        for text in (r"1.5 \times 10^3", "10^{-3}", r"3 \times 10^8 \text{ m/s}", "3 million", "42...")
    ],
    *[("1500", text) for text in (r"1.5 \times 10^3", "1.5·10³", "1.5 x 10^3", "1.5 thousand")],
    *[(text, "1/3") for text in ("0.333...", "0.333…", r"0.333\ldots", r"0.\dot{3}", "0.3\u0305", "0.(3)")],
    ("0.1(6)", "1/6"),
    ("5 kΩ", "5 kiloohms"),
    ("5 sec.", "5 s"),
    ("x ∈ \u211d", r"x\in\mathbb{R}"),
    (r"\frac{yd}{q}", r"\frac{dy}{q}"),
    ("0.1666...", "1/6"),
    ("0.1212...", "4/33"),
    (r"(3,\infty)", r"(3,+\infty)"),
    ("(3, +∞)", r"(3,\infty)"),
    ("1 < x < 3", "1<x<3"),
    ("3 > x ≥ 1", r"1 \leq x<3"),
    ("a/b*c", "ac/b"),
    ("3 million", 3_000_000),
    ("$3 million", "$3,000,000"),
    (r"\begin{bmatrix}1&2\end{bmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    *[(text, 1250) for text in ("\uff11\uff12\uff15\uff10", "1\u202f250", "1\u00a0250", "1\u200b250")],
    ("2⅔", "8/3"),
    ("x¹²", "x^{12}"),
    ("2θ", r"2\theta"),
    ("50\uff05", "50%"),
    ("Zu\u0308rich", "Zürich"),
]
UNEQUAL = [
    # several answers, of which one is right
    *[
        (text, 42)
        for text in ("41 or 42", "42 or 41", "41, 42", "42, 41", "42 and 41", "41; 42", "42 42", "41 42")
    ],
    *[
        (text, 42)
        for text in ("41/42", "42/41", "{41, 42}", r"\{42, 43\}", "[41, 42]", "(42, 42)", "42 | 41", "42\n41")
    ],
    *[
        (text, 42)
        for text in ("42 = 42", "41 = 42", "41 < 42", "x < 42", r"\pm 42", r"42 \pm 1", "41-42", "41 to 42")
    ],
    *[
        (text, 42)
        for text in ("not 42", "42?", "42 or so", "about 42", "~42~41", "42, I think", "42 maybe", "42:1")
    ],
    *[
        (text, 42)
        for text in (
            r"\boxed{41}\boxed{42}",
            r"\boxed{41} 42",
            "$41$ $42$",
            "(41)(42)",
            r"x \in \{42\} \cup \{1\}",
        )
    ],
    # the problem restated
    *[
        (text, 42)
        for text in ("6*7", "6 * 7", r"6 \times 7", r"6 \cdot 7", "6(7)", "(6)(7)", "40+2", "43-1", "84/2")
    ],
    *[
        (text, 42)
        for text in (r"\frac{84}{2}", "42/1", "42*1", "42+0", "42+0y", "42 + 0", "--42", "-(-42)", "|42|")
    ],
    *[
        (text, 42)
        for text in (
            r"\sqrt{1764}",
            "42^1",
            "42!/41!",
            "(41+1)",
            "42x/x",
            "x + 42 - x",
            "6\u00d77",
            "√1764",
            "4.2*10^1",
        )
    ],
    *[
        (text, 6)
        for text in (
            "3!",
            "3 !",
            r"\frac{3!}{1}",
            "2+4",
            "2**1*3",
            "6.0/1",
            r"\log(10^6)",
            "abs(-6)",
            "|\u22126|",
        )
    ],
    ("7!", 5040),
    (r"12 \times 13", 156),
    (r"12 \times 13", r"12 \times 13"),
    ("1/2 + 1/2", 1),
    ("1.5 + 1.5", 3),
    ("-1/-2", "1/2"),
    (r"\frac{-1}{-2}", "1/2"),
    ("0.5/2", "1/4"),
    ("1/2/2", "1/4"),
    # near, or of another kind
    *[
        (text, 42)
        for text in (
            "41",
            "43",
            "-42",
            "42.00001",
            "42.0000001",
            "4.2",
            "420",
            "4 2",
            "0x2a",
            "42j",
            "42_0",
            "४२",
        )
    ],
    *[
        (text, 42)
        for text in (
            "42%",
            "42 million",
            "42k",
            "42 thousand",
            "42 dozen",
            "42 hundred",
            "42 mod 5",
            "4,2",
            "4\u06f2",
        )
    ],
    *[
        (text, 42)
        for text in (
            "",
            " ",
            ".",
            "-",
            "None",
            "nan",
            "inf",
            "True",
            "[]",
            "()",
            "{}",
            "$$",
            "forty-two",
            "?",
        )
    ],
    *[
        (text, 42)
        for text in ("__import__('os').system('true')", "lambda: 42", "eval('42')", "42;import os", "exit()")
    ],
    *[
        (text, 42)
        for text in (
            "9**9**9**9",
            "9^{9^{9^9}}",
            "2003^{2002^{2001}}",
            "factorial(10**7)",
            "(10^7)!",
            "1e999",
        )
    ],
    *[
        (text, 42)
        for text in ("(" * 99 + "42" + ")" * 99, "-" * 100 + "42", "{" * 50, r"\frac" * 20, "^" * 50 + "42")
    ],
    ("0.333", "1/3"),
    ("0.3333333333333333", "1/3"),
    ("0.33", "1/3"),
    ("3.14", r"\pi"),
    ("3.14159265358979", "pi"),
    ("1.41", r"\sqrt2"),
    ("1 3/2", "5/2"),
    ("1 1/2", "1/2"),
    (r"1\frac12", "1/2"),
    ("0.5", "50%"),
    ("50%", 0.5),
    ("50", "50%"),
    ("50%", 50),
    ("5", "5 km"),
    ("5 m", "5 km"),
    ("5000 m", "5 km"),
    ("5 km/h", "5 km"),
    ("5 cm", "5 cm^2"),
    ("€18", "$18"),
    ("18", "$18"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{6}{\sqrt{3}}", r"2\sqrt{3}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x^2+x+x+1", "x^2+2x+1"),
    ("x^2+2x+1", "(x+1)^2"),
    ("y = 3", "x = 3"),
    ("2x = 6", "x = 3"),
    ("2y = 4x + 2", "y = 2x + 1"),
    ("x^2+2x", "x^2+2x+1"),
    ("X", "x"),
    ("x > 3", "x < 3"),
    (r"x \le 3", "x < 3"),
    ("(2, 1)", "(1, 2)"),
    ("(1, 2)", "[1, 2]"),
    ("(1, 2]", "[1, 2)"),
    ("1, 2", "(1, 2)"),
    ("(1, 2, 3)", "(1, 2)"),
    ("1", "1, 2"),
    ("1, 2, 3", "1, 2"),
    ("1, 1, 2", "1, 2"),
    ("1, 1", "1, 2"),
    ("1, 2, 3, 4, 5, 6, 7, 8, 9", [1, 2]),
    ("3", r"\pm 3"),
    ("-3", "3, -3"),
    ("1 or 2", [[1, 2]]),
    ("4:3", "3:4"),
    ("6:8", "3:4"),
    ("101", "101_2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("Tuesday or Wednesday", "Tuesday"),
    ("not Tuesday", "Tuesday"),
    ("felt", "left"),
    ("stop", "pots"),
    ("A or B", "B"),
    ("A", "B"),
    ("AB", "B"),
    ("no", "yes"),
    ("Tuesday", 2),
    ("2", "Tuesday"),
    ("I don't know", 42),
    ("0", "I don't know"),
]
UNEQUAL += [
    *[(text, 40) for text in ("40 squared", "40 cubed", r"40\text{ squared}", "40 Squared.")],
    *[(text, 40) for text in ("twice 40", "half of 40", "40 to the power of 2", "40 percent of 80")],
    ("40 squared meters", "40 meters"),
    ("5 mW", "5 MW"),
    ("5 mg", "5 Mg"),
    ("5 MB", "5 Mb"),
    ("mW", "MW"),
    ("5 m/", "5 m/s"),
    ("5 s/m", "5 m/s"),
    ("5 m", "5 s"),
    ("5", "5 m"),
    ("5 m^3", "5 m^2"),
    ("2gm", "2mg"),
    ("1000 m", "1 km"),
    ("£5", "5 lb"),
    ("20°", "20 °C"),
    *[
        (text, 42)
        for text in ("42m", "42 K", "42 M", "42 pm", "42...", "42…", "~42", "≈42", r"x \sim 42", "41.999...")
    ],
    *[(text, 5000) for text in ("5k", "5 * 1000", "50 * 10^2 * 1", "5(10^3)", "5 million")],
    ("\u211d", "R"),
    ("0.333...", "0.333"),
    ("0.333", "0.333..."),
    ("3.14...", r"\pi"),
    ("x^½", "x/2"),
    ("4②", 42),
    ("1\u20133", -2),
    ("-2", "1\u20133"),
    ("2^{10}", 1024),
    ("x > 3", "1 < x < 3"),
    ("1 < x > 3", "1 < x < 3"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{Vmatrix}1&2\end{Vmatrix}", r"\begin{vmatrix}1&2\end{vmatrix}"),
]
EXPRESSIONS = [
    ("(x+1)^2", "x^2+2x+1", True),
    ("x^2+2x+1", "(1+x)(x+1)", True),
    (r"\frac{x^2-1}{x-1}", "x+1", True),
    (r"\sqrt{12}", r"2\sqrt{3}", True),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True),
    (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}", True),
    (r"(\sqrt2+1)(\sqrt2-1)", "1", True),
    (r"12 \times 13", 156, True),
    ("3!", 6, True),
    ("2^{10}", 1024, True),
    ("4^{1/2}", 2, True),
    (r"\sqrt[3]{27}", 3, True),
    (r"|-3|", 3, True),
    (r"2\sin(x)", r"\sin(x)+\sin(x)", True),
    (r"\frac{a}{b}+\frac{c}{d}", r"\frac{ad+bc}{bd}", True),
    ("(x+1)^2", "x^2+1", False),
    (r"\sqrt{5}", r"\sqrt{2}+\sqrt{3}", False),
    (r"\sqrt{4+9}", "5", False),
    ("x", "y", False),
    ("2(3)", 6, True),
    ("(2)(3)", 6, True),
    ("ab/c", "a/c*b", True),
    ("(1+i)^2", "2i", True),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}", True),
    (r"\sqrt{-4}", "2i", True),
    ("5 m", "5 meters", True),
    ("1500", r"1.5 \times 10^3", True),
    ("i", "1", False),
    ("0.(3)", 0, False),
    ("1\u20133", -2, False),
    ("f(3)", "3f", False),
    (r"\frac{1}{0}", 1, False),
    ("0^0", 1, False),
    ("1/3", "0.3333333333", False),
    ("41 or 42", 42, False),
    ("2x = 6", "x = 3", False),
    ("2003^{2002^{2001}}", 1, False),
    ("9**9**9", 42, False),
    ("((((x+1)^{40})^{40})^{40})^{40}", "x", False),
    ("(a+b+c+d+e)^{40}", "x", False),
    ("(10^7)!", 42, False),
    (r"\pi", "3.14159265358979", False),
    ("__import__('os')", 42, False),
]
SYMBOLIC = [
    (r"\sin^2 x + \cos^2 x", "1", True),
    (r"\sin(2x)", r"2\sin x\cos x", True),
    (r"\log_2(8)", "3", True),
    (r"\sin(\frac{\pi}{6})", "1/2", True),
    (r"\frac{1}{3}+\sin(x)", r"0.3333333333+\sin(x)", False),
    (r"\sin(x)", r"\cos(x)", False),
    (r"\sin(x) + 1", r"\sin(x)", False),
    (r"e^{99!}", "1", False),
]


def test_the_table_is_long_enough_to_mean_something() -> None:
    assert len(EQUAL) + len(UNEQUAL) + len(EXPRESSIONS) + len(SYMBOLIC) >= 300
    assert len(UNEQUAL) >= 180


@pytest.mark.parametrize(("text", "truth"), EQUAL)
def test_the_same_value_written_otherwise_is_right(text: object, truth: object) -> None:
    assert math_agreement(str(text), truth)
    assert math_agreement(str(text), truth, form="expression")


@pytest.mark.parametrize(("text", "truth"), UNEQUAL)
def test_what_is_not_the_value_is_wrong(text: str, truth: object) -> None:
    begun = time.process_time()
    assert not math_agreement(text, truth)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(("text", "truth", "equal"), EXPRESSIONS)
def test_an_expression_may_be_written_in_any_way_that_is_equal(text: str, truth: object, equal: bool) -> None:
    begun = time.process_time()
    assert math_agreement(text, truth, form="expression") is equal
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(("text", "truth", "equal"), SYMBOLIC)
def test_what_is_beyond_polynomials_math_verify_decides(text: str, truth: object, equal: bool) -> None:
    assert math_agreement(text, truth, form="expression") is equal


def test_an_answer_of_200_characters_is_read_and_a_longer_one_is_none() -> None:
    digits = "1" * MAX_ANSWER
    assert math_agreement(digits, digits)
    assert not math_agreement(digits + "1", digits + "1")


def test_answers_of_20_000_characters_take_no_time() -> None:
    begun = time.process_time()
    for text in (
        "(" * 20_000,
        "1," * 10_000,
        r"\frac" * 5_000,
        "9**" * 7_000 + "9",
        " " * 20_000 + "42" + " " * 20_000,
    ):
        math_agreement(text, 42)
        math_agreement(text, 42, form="expression")
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    "truth", ["", " ", [], [[]], [[[1]]], None, True, float("nan"), {"a": 1}, "1" * 3000]
)
def test_a_truth_that_is_none_is_refused(truth: object) -> None:
    with pytest.raises(ConfigurationError, match="answer"):
        math_agreement("42", truth)


@pytest.mark.parametrize(
    "truth", ["2^{10}", r"12 \times 13", "3!", "84/2", "4.2*10^1", "1-3", "1" * 201, [1, "2*3"]]
)
def test_a_truth_that_is_not_its_own_answer_is_refused(truth: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"would be wrong: write it evaluated, .* or set form: expression"
    ):
        check_truth(truth)


@pytest.mark.parametrize(
    "truth", ["10^{-1}", "1.5e3", "$5", "1,250", ["1,250", [["1/2", "a half"]][0]], "~42", 0.1]
)
def test_a_truth_that_is_its_own_answer_is_taken(truth: object) -> None:
    check_truth(truth)
    check_truth("2^{10}", form="expression")


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="form must be value or expression, got 'values'"):
        math_agreement("42", 42, form="values")  # type: ignore[arg-type]  # that is the mistake


rationals = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=500)


def written(value: Fraction) -> list[str]:
    """Ways to write a rational number."""
    sign, top, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    texts = [str(value), f"${value}$", f"x = {value}", rf"\boxed{{{value}}}"]
    if below > 1:
        texts += [
            rf"{sign}\frac{{{top}}}{{{below}}}",
            rf"\frac{{{sign}{top}}}{{{below}}}",
            f"{sign}{3 * top}/{3 * below}",
        ]
        if top > below:
            texts += [f"{sign}{top // below} {top % below}/{below}"]
    else:
        texts += [f"{value.numerator:,}", f"{value.numerator}.0"]
    return texts


@given(rationals, rationals, st.data())
def test_nobody_but_the_true_value_is_right(value: Fraction, truth: Fraction, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(written(value)))
    for wording in written(truth):
        assert math_agreement(text, wording) is (value == truth)


@given(st.integers(0, 999), st.text("0123456789+-*/^!(){}.,;=x \\frac|", max_size=30))
@example(42, "42 ")
def test_any_text_that_is_taken_for_a_number_is_that_number(truth: int, text: str) -> None:
    """Checked by Python's own reading of what is left when marks that say nothing are taken off."""
    if math_agreement(text, truth):
        plain = text.strip(" .").replace("x", "").replace("=", "").strip(" (){}").replace(",", "")
        assert Fraction(plain.split("frac")[0].strip(" \\") or "0") == truth


@given(st.text(max_size=300))
@settings(max_examples=300)
def test_no_text_breaks_the_comparison(text: str) -> None:
    for truth in (42, "1/2", r"2\sqrt3", "x^2+1", [1, 2], "Tuesday", "[1,2)"):
        assert math_agreement(text, truth) in (True, False)
        assert math_agreement(text, truth, form="expression") in (True, False)


leaves = st.sampled_from(["x", "y", "2", "3", "5", "1/2", "sqrt(2)", "sqrt(3)", "pi"])
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=8,
)


@given(trees, trees)
def test_exact_equality_is_that_of_numbers_put_in(left: str, right: str) -> None:
    """x, y and pi get values that no small expression joins; floats tell unequal ones apart."""
    names = {"x": 1.2345678, "y": -0.7654321, "pi": 3.141592653589793, "sqrt": lambda value: value**0.5}
    numbers = [eval(text, {"__builtins__": {}}, names) for text in (left, right)]
    equal = are_equal(read(left), read(right))
    assert equal is (abs(numbers[0] - numbers[1]) < 1e-9 * max(1, abs(numbers[0])))


@given(st.text(r"0123456789+-*/^!(){}[].,;=x\frac sqrt{}&|<>%$", max_size=200))
@settings(max_examples=300)
def test_reading_any_text_is_quick_or_refused(text: str) -> None:
    # A collection of the whole suite's garbage may fall into one.
    assert min(cpu_seconds(text) for _ in range(3)) < 1


def cpu_seconds(text: str) -> float:
    begun = time.process_time()
    with contextlib.suppress(Unreadable):
        read(text)
    return time.process_time() - begun
