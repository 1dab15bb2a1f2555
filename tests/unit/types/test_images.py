"""Pictures in messages: marks in the content, OpenAI's parts, records."""

from __future__ import annotations

import base64

import pytest

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import IMAGE_MARK, Image
from stateset_agents.types.messages import Message

DATA = b"a picture's bytes"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
PICTURE = {"type": "image_url", "image_url": {"url": URL}}


def test_parts_become_text_with_marks_and_back() -> None:
    content = [{"type": "text", "text": "left "}, PICTURE, {"type": "text", "text": " right "}, PICTURE]
    message = Message.from_openai({"role": "user", "content": content})
    assert message.content == f"left {IMAGE_MARK} right {IMAGE_MARK}"
    assert [image.data for image in message.images] == [DATA, DATA]
    assert message.pieces == ["left ", " right ", ""]
    assert message.to_openai()["content"] == content
    assert Message.from_record(message.to_record()) == message


def test_a_message_of_text_alone_stays_as_it_was() -> None:
    message = Message.from_openai({"role": "user", "content": [{"type": "text", "text": f"a{IMAGE_MARK}b"}]})
    assert (message.content, message.images) == (f"a{IMAGE_MARK}b", ())
    assert message.to_openai() == {"role": "user", "content": f"a{IMAGE_MARK}b"}


def test_a_mark_in_words_stands_for_no_picture() -> None:
    message = Message.from_openai(
        {"role": "user", "content": [{"type": "text", "text": IMAGE_MARK}, PICTURE]}
    )
    assert message.content == f"\ufffd{IMAGE_MARK}"


def test_pictures_are_compared_by_content_and_shown_by_digest() -> None:
    one, other = Image(data=DATA), Image(data=b"another")
    assert one == Image(data=DATA)
    assert one != other
    assert repr(one) != repr(other)
    assert "bytes" not in repr(one)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "a picture must be a data URL"),
        ("data:image/png;base64,%%%", "a picture's data URL is not base64"),
        ("data:image/png;base64,", "a picture must be the bytes of an image file"),
        (None, "a picture must be a data URL"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(url: object, why: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ConfigurationError, match=why) as refused:
        Message.from_openai({"role": "user", "content": [part]})
    assert "\n" not in str(refused.value)


def test_a_picture_needs_its_mark() -> None:
    with pytest.raises(ConfigurationError, match="a message with 1 pictures needs as many IMAGE_MARKs"):
        Message(role="user", content="look", images=(Image(data=DATA),))
