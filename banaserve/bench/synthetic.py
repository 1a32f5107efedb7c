"""Made-up English prompts: sentences from a small grammar, told apart by their seed.

They stand in where no data files are at hand. Their words are real and their sentences sound,
so tokenizers and caches see ordinary text; what they say is nonsense, and no benchmark of quality
may use them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from banaserve.bench import vocabulary
from banaserve.bench.vocabulary import Topic

_PASSAGE_FROM_TOKENS = 120
"""From this length on a prompt is a titled text with a question at its end, else a task."""

_TITLE = "{number} notes on the {quality} {thing} of {place}, collected by {person}"


def write_prompt(seed: str, target_tokens: int, tokenize: Callable[[str], Sequence[int]]) -> str:
    """Returns a prompt of about ``target_tokens``: a few more or less, never less than a sentence.

    The same seed, target and tokenizer give the same text; another seed gives other first words.
    """
    draws = random.Random(seed)
    topic = draws.choice(vocabulary.TOPICS)
    if target_tokens < _PASSAGE_FROM_TOKENS:
        text = _sentence(draws, topic, vocabulary.OPENINGS)
        body = _grown(text, " ", draws, topic, target_tokens, tokenize)
        return _filled(body, draws, target_tokens, tokenize)
    question = "\n\n" + _sentence(draws, topic, vocabulary.QUESTIONS)
    room_tokens = target_tokens - len(tokenize(question))
    text = _sentence(draws, topic, (_TITLE,))
    body = _grown(text, "\n\n", draws, topic, room_tokens, tokenize)
    return _filled(body, draws, room_tokens, tokenize) + question


def _grown(
    text: str,
    separator: str,
    draws: random.Random,
    topic: Topic,
    target_tokens: int,
    tokenize: Callable[[str], Sequence[int]],
) -> str:
    """Adds sentences, in paragraphs, until the next one would pass the target."""
    parts = [text]
    num_tokens = len(tokenize(text))
    left_in_paragraph = draws.randint(4, 7)
    while True:
        piece = separator + _sentence(draws, topic, vocabulary.SENTENCES)
        num_tokens += len(tokenize(piece))
        if num_tokens > target_tokens:
            return "".join(parts)
        parts.append(piece)
        left_in_paragraph -= 1
        separator = " " if left_in_paragraph else "\n\n"
        if not left_in_paragraph:
            left_in_paragraph = draws.randint(4, 7)


def _filled(
    text: str, draws: random.Random, target_tokens: int, tokenize: Callable[[str], Sequence[int]]
) -> str:
    """Adds short exclamations up to the target, since sentences do not come in every length."""
    fillers = list(vocabulary.FILLERS)
    draws.shuffle(fillers)
    num_tokens = len(tokenize(text))
    for filler in fillers:
        added_tokens = len(tokenize(filler))
        if num_tokens + added_tokens <= target_tokens:
            text += filler
            num_tokens += added_tokens
    return text


def _sentence(draws: random.Random, topic: Topic, patterns: Sequence[str]) -> str:
    thing, other = draws.sample(topic.things, 2)
    person, friend = draws.sample(vocabulary.PEOPLE, 2)
    time = draws.choice(vocabulary.TIMES)
    number = draws.randint(3, 96)
    text = draws.choice(patterns).format(
        topic=topic.name,
        thing=thing,
        other=other,
        quality=draws.choice(topic.qualities),
        act=draws.choice(topic.acts),
        person=person,
        friend=friend,
        place=draws.choice(vocabulary.PLACES),
        time=time,
        time_first=time[0].upper() + time[1:],
        number=number,
        smaller=draws.randint(2, number - 1),
    )
    return _with_right_article(text)


def _with_right_article(text: str) -> str:
    words = text.split(" ")
    for place, (word, following) in enumerate(pairwise(words)):
        if word in ("a", "A") and following[:1].lower() in set("aeiou"):
            words[place] = word + "n"
    return " ".join(words)
