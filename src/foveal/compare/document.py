"""The text of a comparison: a context of exact length with facts hidden in it, its continuation, and questions."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
PROSE = ("specialnames", "compound", "customization", "execmodel", "import", "strings", "naming", "objects", "types")
PEOPLE = (
    "Ahmed", "Amelia", "Boris", "Carlos", "Chen", "Clara", "Diana", "Emma", "Grace", "Hannah", "Hassan", "Ivan",
    "Julia", "Karl", "Lars", "Leo", "Lucy", "Olivia", "Omar", "Oscar", "Rosa", "Sofia", "Victor", "Wei",
)  # fmt: skip
BREAK_WITHIN = 64  # tokens that a fact may move forward to the next line break


def read(path: str | os.PathLike[str] | None) -> tuple[str, str]:
    """The text of a file, or of Python's own language reference, and what to call it.

    Args:
        path: a UTF-8 text file; None is the default text, which every Python carries.

    Raises:
        ValueError: if there is no such file, or it is empty or no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in PROSE if key in topics), "Python language reference"
    name, file = os.fspath(path), pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"document: {name!r} is {'a folder' if file.is_dir() else 'missing'}, expected a text file")
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"document: {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"document: {name!r} is not UTF-8 at byte {error.start}, expected a text file") from error
    if "\0" in text:
        raise ValueError(f"document: {name!r} has a zero byte at {content.index(0)}, expected a text file")
    if not text.strip():
        raise ValueError(f"document: {name!r} is empty, expected a text")
    return text, file.name


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence hidden in the context, and how it is asked for.

    Args:
        person, code: the key and the value.
    """

    person: str
    code: str

    @property
    def sentence(self) -> str:
        """What the context says."""
        number = f"the secret number of {self.person}"
        return f"\n\nRemember this: {number} is {self.code}. {self.code} is {number}.\n\n"

    @property
    def question(self) -> str:
        """What is fed after the context; the answer is the code, exactly."""
        return f"\n\nAs stated above, the secret number of {self.person} is"


def facts(count: int, seed: int) -> list[Fact]:
    """Different people with random codes of five digits.

    Raises:
        ValueError: if there are fewer names than facts.
    """
    if not 1 <= count <= len(PEOPLE):
        raise ValueError(f"depths: has {count} values, expected 1 to {len(PEOPLE)}")
    draw = random.Random(seed)
    return [Fact(person, str(draw.randint(10000, 99999))) for person in draw.sample(PEOPLE, count)]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about one hidden fact, as tokens.

    Args:
        depth: where the fact was asked to be, 0 is the beginning of the context.
        place: index of its first token in the context.
        prompt: tokens fed before the answer.
        answer: tokens that must follow.
    """

    depth: float
    place: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """What one round of a comparison reads.

    Args:
        context: tokens of the document with the facts in it, of exactly the length asked for.
        continuation: the document's next tokens, whose prediction is judged.
        questions: one for each fact.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    questions: tuple[Question, ...]


def hide(
    base: Sequence[int], needles: Sequence[Sequence[int]], depths: Sequence[float], breaks: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Insert token sequences at given depths of a text, each after the next line break if one is near.

    Args:
        base: the text's tokens.
        needles: what to insert.
        depths: one for each, ascending, as shares of the text.
        breaks: whether a token of the text ends a line.

    Returns:
        the tokens, and the index in them of each needle's first token.
    """
    context: list[int] = []
    places, done = [], 0
    for needle, depth in zip(needles, depths, strict=True):
        cut = max(round(depth * len(base)), done)
        near = range(cut, min(cut + BREAK_WITHIN, len(base)))
        cut = next((n for n in near if n > 0 and breaks(base[n - 1])), cut)
        context += base[done:cut]
        places.append(len(context))
        context += needle
        done = cut
    return context + list(base[done:]), places


def ask(fact: Fact, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of a fact's question, and those of its answer as they follow it in running text."""
    alone, answered = encode(fact.question), encode(f"{fact.question} {fact.code}")
    shared = 0
    while shared < len(alone) and alone[shared] == answered[shared]:
        shared += 1
    return tuple(answered[:shared]), tuple(answered[shared:])


def excerpts(
    text: str,
    tokenizer: Any,
    *,
    length: int,
    continuation: int,
    rounds: int,
    seed: int,
    depths: Sequence[float] = DEPTHS,
) -> list[Excerpt]:
    """One excerpt for each round: other facts every time, and as far as the document reaches another part of it.

    Args:
        text: the document.
        tokenizer: a transformers tokenizer.
        length: tokens of the context, facts included.
        continuation: tokens after it.
        rounds: how many excerpts.
        seed: seed of the facts.
        depths: where the facts are hidden.

    Raises:
        ValueError: if the document is too short, or the length leaves no room for the facts.
    """

    def encode(string: str) -> list[int]:
        return list(tokenizer.encode(string, add_special_tokens=False, verbose=False))

    def breaks(token: int) -> bool:
        return "\n" in tokenizer.decode([token])

    start = _start_token(tokenizer)
    tokens, result = encode(text), []
    for number in range(rounds):
        hidden = facts(len(depths), seed * 1000 + number)
        sentences = [encode(fact.sentence) for fact in hidden]
        body = length - len(start) - sum(map(len, sentences))
        if body < len(depths):
            raise ValueError(f"length: has {length}, expected at least {length - body + len(depths)} to hide the facts")
        spare = len(tokens) - body - continuation
        if spare < 0:
            raise ValueError(
                f"document: has {len(tokens)} tokens, expected at least {body + continuation} for length {length} and "
                f"a continuation of {continuation}" + _advice(length + spare, length - body)
            )
        first = spare * number // rounds
        context, places = hide(tokens[first : first + body], sentences, depths, breaks)
        questions = tuple(
            Question(depth, place + len(start), *ask(fact, encode))
            for depth, place, fact in zip(depths, places, hidden, strict=True)
        )
        after = tokens[first + body : first + body + continuation]
        result.append(Excerpt((*start, *context), tuple(after), questions))
    return result


def _advice(possible: int, facts: int) -> str:
    return f"; this text allows --length {possible}" if possible > 2 * facts else "; use a longer text"


def _start_token(tokenizer: Any) -> tuple[int, ...]:
    """The token that this tokenizer puts before every text, if any."""
    start = tokenizer.bos_token_id
    return (start,) if start is not None and start in tokenizer.encode("") else ()
