"""Which tokens a grammar allows next: llguidance's matchers over one of our tokenizers.

Rollouts mask logits by them before they sample, and the update asks them again over the sampled ids. The
only module that imports llguidance.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from string import punctuation
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stateset_agents.backends.base import Tokenizer
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.constraint import Packed as Packed
from stateset_agents.types.errors import BackendError, ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.backends.closing import Closer, Closing, TokenTexts

_MOST_COMPILED = 256
"""Grammars that are kept compiled, one for each choice of tools and schema."""
_MOST_TEXT = 2**22
"""Characters of theirs; compiled, an enum takes some thirty bytes for each."""
_PROBE = 'a "W12" $5 (x) [y] #z {"k": "v", "n": -1.5}\n\tend. Ünïcode'


def llguidance() -> Any:
    """The library; raises ConfigurationError where it is missing."""
    try:
        import llguidance as library
    except ImportError as error:
        raise ConfigurationError(
            'constrained decoding needs llguidance. Install it with: pip install "llguidance>=1.9,<2"'
        ) from error
    return library


@lru_cache(1)
def library_version() -> str:
    """The version of the library, which constraints carry."""
    version: str = llguidance().get_version()
    return version


class Matcher:
    """A grammar on its way through one reply."""

    def __init__(self, matcher: Any, num_words: int, closing: Closing | None = None) -> None:
        """`closing`: ends the reply before its limit, where it has one."""
        self._matcher = matcher
        self._num_words = num_words
        self._closing = closing

    def allowed(self) -> Packed:
        """[W] the tokens that may come next. Raises BackendError where the library gave up."""
        from stateset_agents.backends.closing import mask_of  # numpy only where there is a grammar

        mask = mask_of(self._matcher, self._num_words)
        self._expect_no_error()
        return mask if self._closing is None else self._closing.narrowed(self._matcher, mask)

    def advance(self, token: int) -> None:
        """Take the next token. Raises BackendError for one that the grammar forbids."""
        if not self._matcher.consume_token(token):
            self._expect_no_error()
        if self._closing is not None:
            self._closing.advance(token)

    def _expect_no_error(self) -> None:
        if self._matcher.is_error():
            line = " ".join(str(self._matcher.get_error()).split())
            raise BackendError(f"the grammar of a reply cannot go on: {line:.200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joins:
    """The tokens of a tokenizer that writes `"Oslo"` as `"`, a joiner and ` Oslo`."""

    waits: Sequence[bool]
    """[V] True for a token that ends with a joiner."""
    space: int
    """The token of a single space."""
    spelled: Sequence[int]
    """The tokens of a joiner that is written byte by byte."""
    opens: Sequence[bool]
    """[V] True for a token behind whose text a joiner may stand."""


class JoiningMatcher(Matcher):
    """A matcher for a tokenizer with a joiner.

    The library knows each token twice: as it is, and behind a joiner, where its first space is none.
    """

    def __init__(self, matcher: Any, joins: Joins, stop_ids: Sequence[int]) -> None:
        super().__init__(matcher, (2 * len(joins.waits) + 31) // 32)
        self._joins = joins
        self._stop_ids = list(stop_ids)
        self._written = 0
        """Bytes of a joiner that stand there; all of them: the next token's first space is none."""
        self._opens = False
        """True where a joiner may come; elsewhere a reply could be nothing but joiners."""

    def allowed(self) -> Packed:
        import numpy as np

        joins, size = self._joins, len(self._joins.waits)
        bits = np.unpackbits(super().allowed().view(np.uint8), bitorder="little")
        allowed = np.zeros((size + 31) // 32 * 32, np.uint8)
        if self._written == len(joins.spelled):
            allowed[:size] = bits[size : 2 * size]
            allowed[joins.space] = 1  # the joiner takes it, and nothing is written
        elif self._written:
            allowed[joins.spelled[self._written]] = 1
        else:
            allowed[:size] = bits[:size]
            bits[self._stop_ids] = 0
            allowed[joins.spelled[0]] = self._opens and bits[:size].any()
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def advance(self, token: int) -> None:
        joins = self._joins
        is_joined = self._written == len(joins.spelled)
        if is_joined and token == joins.space:
            self._written, self._opens = 0, False
        elif not is_joined and token == joins.spelled[self._written]:
            self._written += 1
        else:
            super().advance(token + len(joins.waits) * is_joined)
            self._written, self._opens = len(joins.spelled) * joins.waits[token], joins.opens[token]


def only_token(mask: Packed) -> int | None:
    """The token of a mask [W] that allows no other; None where it allows several."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else int(words[0]) * 32 + bits.bit_length() - 1


class Grammars:
    """The grammars of one tokenizer, compiled when they are first asked for; from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabularies: dict[tuple[int, ...], Any] = {}
        self._joins: Joins | None = None
        self._compile = lru_cache(_MOST_COMPILED)(self._new_matcher)
        self._closer = lru_cache(_MOST_COMPILED)(self._new_closer)
        self._texts = lru_cache(1)(self._new_texts)
        self._compiled_text = 0

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher before the first token of a reply.

        Raises ConfigurationError without llguidance, for a tokenizer that it cannot read, for another version
        of it than the constraint's, and for a grammar that it refuses, in its words.
        """
        unlimited = replace(constraint, limit=None, raised=None)
        with self._lock:
            matcher, num_words = self._compile(unlimited)
            if self._joins is not None:
                return JoiningMatcher(matcher.deep_copy(), self._joins, constraint.stop_ids)
            closing = None
            if constraint.limit is not None:
                from stateset_agents.backends.closing import Closing

                closing = Closing(self._closer(unlimited), constraint.limit)
            return Matcher(matcher.deep_copy(), num_words, closing)

    def replay(self, constraint: Constraint, ids: Sequence[int]) -> Packed:
        """[T, W] what was allowed at each token of a reply.

        Raises BackendError where it has a token that the grammar forbids.
        """
        import numpy as np

        matcher = self.matcher(constraint)
        masks = []
        for token in ids:
            masks.append(matcher.allowed())
            if not int(masks[-1][token // 32]) >> token % 32 & 1:
                raise BackendError(
                    f"a reply has the token {token} ({self._tokenizer.piece(token)!r}) where its grammar "
                    f"forbids it, by llguidance {library_version()} here: the engine that sampled it reads "
                    "the grammar, or the tokenizer, otherwise"
                )
            matcher.advance(token)
        return np.stack(masks) if masks else np.zeros((0, 0), np.int32)

    def _new_matcher(self, constraint: Constraint) -> tuple[Any, int]:
        library = llguidance()
        if constraint.version != library_version():
            raise ConfigurationError(
                f"a reply was constrained by llguidance {constraint.version}, and here is "
                f"{library_version()}, which may allow other tokens: install the one that sampled"
            )
        vocabulary = self._vocabulary(constraint.stop_ids)
        grammar = constraint.grammar
        self._compiled_text += len(grammar)
        if self._compiled_text > _MOST_TEXT:
            self._compile.cache_clear()
            self._closer.cache_clear()
            self._compiled_text = len(grammar)
        control = getattr(self._tokenizer, "control", {})
        # The library cannot say how a joiner's tokenizer would cut forced text, and it cuts the name of a
        # control token in a schema as that token.
        if self._joins is not None or any(name in grammar for name in control):
            grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
        matcher = library.LLMatcher(vocabulary, library.LLMatcher.grammar_from_lark(grammar), log_level=0)
        first = matcher.deep_copy()  # what no reply fits fails at its first token or in what is forced
        first.consume_tokens(first.compute_ff_tokens())
        first.compute_bitmask()
        if first.is_error():
            raise ConfigurationError(_refusal(first.get_error()))
        return matcher, (vocabulary.vocab_size + 31) // 32

    def _new_closer(self, constraint: Constraint) -> Closer:
        from stateset_agents.backends.closing import Closer

        encode = getattr(self._tokenizer, "encode_markup", self._tokenizer.encode)
        calls = None
        if constraint.opener:
            # The grammar is `reply_grammar`'s, whose first rule is the start.
            _, _, rules = constraint.grammar.partition("\n")
            calls = self._compile(replace(constraint, grammar=f"start: calls\n{rules}"))[0].deep_copy()
        return Closer(constraint, self._texts(constraint.stop_ids), encode, calls)

    def _new_texts(self, stop_ids: tuple[int, ...]) -> TokenTexts:
        from stateset_agents.backends.closing import TokenTexts

        vocabulary, names = self._vocabulary(stop_ids), getattr(self._tokenizer, "control", {})
        # A byte that no text has tells control tokens from the same written out.
        control = {id: b"\xff" + text.encode() for text, id in names.items()}
        ids = range(vocabulary.vocab_size)
        return TokenTexts([control.get(id) or vocabulary.decode_bytes([id]) for id in ids])

    def _vocabulary(self, stop_ids: tuple[int, ...]) -> Any:
        """Our tokenizer as the library reads it; control tokens are no text."""
        if stop_ids in self._vocabularies:
            return self._vocabularies[stop_ids]
        backend = getattr(getattr(self._tokenizer, "hf", None), "backend_tokenizer", None)
        if backend is None:
            raise ConfigurationError(
                f"constrained decoding reads tokenizers of the tokenizers library, and "
                f"{type(self._tokenizer).__name__} is none: use a model with a tokenizer.json"
            )
        state = json.loads(backend.to_str())
        control = getattr(self._tokenizer, "control", {})
        for token in state["added_tokens"]:
            token["special"] = token["content"] in control
        state["truncation"] = state["padding"] = None
        vocabulary = llguidance().LLTokenizer(json.dumps(state), eos_token=list(stop_ids))
        probe = self._tokenizer.encode(_PROBE)
        if vocabulary.decode_bytes(probe) != self._tokenizer.decode(probe).encode():
            vocabulary = self._joined(vocabulary, state, stop_ids)
        return self._vocabularies.setdefault(stop_ids, vocabulary)

    def _joined(self, plain: Any, state: Mapping[str, Any], stop_ids: tuple[int, ...]) -> Any:
        """The vocabulary of a tokenizer with a joiner, each token twice. Raises ConfigurationError for one
        that rewrites text in another way."""
        steps = (state["decoder"] or {}).get("decoders", ())
        patterns = [step["pattern"]["String"] for step in steps if step.get("content") == ""]
        joiner = patterns[0].removesuffix(" ").encode() if len(patterns) == 1 else b""
        texts = [plain.decode_bytes([id]) for id in range(plain.vocab_size)]
        if not joiner or any(bytes([byte]) not in texts for byte in b" " + joiner):
            raise ConfigurationError(
                "constrained decoding needs a tokenizer whose tokens are pieces of the text, and this "
                "model's rewrites it: use another model, such as package:smollm2"
            )
        control: Mapping[str, int] = getattr(self._tokenizer, "control", {})
        encode = self._tokenizer.encode
        marks = [mark for mark in punctuation if joiner in plain.decode_bytes(encode(f"{mark}x"))]
        self._joins = Joins(
            waits=[text.endswith(joiner) for text in texts],
            space=texts.index(b" "),
            spelled=[texts.index(bytes([byte])) for byte in joiner],
            opens=[text.endswith(tuple(map(str.encode, marks))) for text in texts],
        )
        texts = [text.replace(joiner + b" ", b"").removesuffix(joiner) for text in texts]
        texts[self._joins.spelled[0]] = b""  # it begins a joiner, and no other character
        for name, id in control.items():
            texts[id] = b"\xff" + name.encode()
        behind = [text[1:] if text.startswith(b" ") else b"" for text in texts]
        return _joined_vocabulary([*texts, *behind], sorted(control.values()), stop_ids)


def _joined_vocabulary(texts: Sequence[bytes], control: Sequence[int], stop_ids: Sequence[int]) -> Any:
    library = llguidance()

    class Tokens:
        """In the shape that the library reads."""

        eos_token_id, bos_token_id = stop_ids[0], None
        tokens, special_token_ids = texts, control

        def __call__(self, text: bytes) -> list[int]:
            raise BackendError("a grammar without forcing asks for no tokens of a text")

    return library.LLTokenizer(library.TokenizerWrapper(Tokens()), eos_token=list(stop_ids))


_of_tokenizer: WeakKeyDictionary[Any, Grammars] = WeakKeyDictionary()


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """The compiled grammars of a tokenizer; the same for backend, agent and update."""
    grammars = _of_tokenizer.get(tokenizer)
    return _of_tokenizer.setdefault(tokenizer, Grammars(tokenizer)) if grammars is None else grammars


def _refusal(error: str) -> str:
    return f"llguidance cannot follow this grammar: {' '.join(error.partition('<state>')[0].split()):.300}"
