"""What is taken out of served conversations: one test for each kind, and what must stay."""

from __future__ import annotations

import pytest

from stateset_agents.core.sources.personal_text import KINDS, Redactor, redact


def expect(kind: str, texts: list[str]) -> None:
    """All of each text behind `>` goes, in any surroundings, and is counted under its kind."""
    assert kind in KINDS
    for text in texts:
        around, _, secret = text.rpartition(">")
        for before, after in (("", ""), ("It is ", ", thank you."), ("(", ")"), ("a\n", "\nb")):
            cleaned = redact(f"{before}{around}{secret}{after}")
            assert cleaned.text == f"{before}{around}[{kind} 1]{after}", text
            assert cleaned.counts == {kind: 1}
            assert redact(cleaned.text).text == cleaned.text


def test_cards_are_told_by_their_check_digit() -> None:
    numbers = ["4111111111111111", "4111 1111 1111 1111", "3782-822463-10005", "6304 0000 0000 0000 000"]
    numbers += ["4222222222222", "5555\u00a05555\u00a05555\u00a04444", "5105.1051.0510.5100"]
    expect("card", numbers)
    assert redact("4111 1111 1111 1111 12/27 123").text == "[card 1] 12/27 123"
    for other in ("4111111111111112", "order 1234567812345678", "12345678901234567890123", "0" * 16):
        assert redact(other).text == other


def test_bank_accounts_are_told_by_their_check_digits() -> None:
    expect("iban", ["DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19", "NO93 8601 1117 947"])
    assert redact("DE89 3704 0044 0532 0130 00 SAYS ANN").text == "[iban 1] SAYS ANN"
    assert redact("DE88370400440532013000").counts == {}


def test_mail_addresses() -> None:
    expect("mail", ["ann@example.org", "ann.o'neil+shop@mail.example.co.uk", "änne@bücher.example"])
    assert redact("@ann said 3@4 a@b").counts == {}


def test_telephone_numbers() -> None:
    numbers = ["+4930123456", "+49 (0)30 123456-78", "+1 555 123 4567", "0049 30 123456", "030/1234567"]
    numbers += ["030 123 45 67", "(030) 1234567", "(555) 123-4567", "555-123-4567", "1-800-555-0199"]
    expect("phone", numbers)
    for other in ("2026-11-25 13:45:02", "order 1234567", "19.99 of 1,000,000", "K0301", "0.12345678"):
        assert redact(other).text == other


def test_social_security_numbers() -> None:
    expect("ssn", ["123-45-6789"])
    assert redact("1123-45-6789 and 123-45-67890").counts == {}


def test_addresses_of_machines() -> None:
    expect("address", ["192.168.0.17", "2001:db8::8a2e:370:7334", "::1"])
    for other in ("version 1.2.3", "12:30:45", "999.1.1.1", "std::vector", "a :: b"):
        assert redact(other).text == other


def test_keys_tokens_and_passwords() -> None:
    block = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----"
    keys = [block, "sk-proj-abcdefghijklmnop1234", "ghp_" + "a1" * 18, "AKIA" + "ABCD" * 4]
    keys += ["xoxb-1234567890-abc", "AIza" + "x" * 35, "hf_" + "b" * 34, "glpat-" + "c" * 20]
    keys += ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "Authorization: Bearer >abcdef123456"]
    expect("secret", keys)
    assert redact("my password is hunter2, ok").text == "my password is [secret 1], ok"
    assert redact("PIN: 4711; cvv 123").text == "PIN: [secret 1]; cvv [secret 2]"
    assert redact("https://ann:hunter2@shop.example/x").text == "https://[secret 1]@shop.example/x"
    assert redact(block[:60]).text == "[secret 1]"  # cut off
    assert redact("a pint of opinion").counts == {}


def test_what_is_equal_is_called_the_same_in_a_conversation_s_words_and_calls() -> None:
    redactor = Redactor()
    assert redactor.text("I am ann@example.org, not bob@example.org") == "I am [mail 1], not [mail 2]"
    call = {"mail": "ANN@example.org", "card": 4111111111111111, "order": "K27", "number": 3, "gift": True}
    assert redactor.value(call) == {**call, "mail": "[mail 1]", "card": "[card 1]"}
    assert redactor.text("4111-1111-1111-1111") == "[card 1]"
    assert redactor.value({"list": [{"api_key": "x", "password": "y", "token": ""}]}) == {
        "list": [{"api_key": "[secret 1]", "password": "[secret 2]", "token": ""}]
    }
    assert redactor.counts == {"mail": 3, "card": 2, "secret": 2}


@pytest.mark.parametrize("piece", ["1 ", "a.", "A1", "+1-", ":", "password is ", "a@", "eyJ.", "(0"])
def test_a_long_text_takes_time_in_proportion(piece: str) -> None:
    import time

    def cost(size: int) -> float:
        text = piece * (size // len(piece))
        begin = time.process_time()
        redact(text)
        return time.process_time() - begin

    assert cost(8_000) < 20 * max(cost(2_000), 0.005)  # 4 by proportion, 16 by squares of a slow beginning
