"""English prompts of wanted lengths: from data files, or sentences of a small grammar by a seed.

The words of synthetic prompts are real and their sentences grammatical, so tokenizers and caches
see ordinary text; the content is nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.datasets.files import dataset_files
from banaserve_bench.datasets.items import Tokenize, without_middle


class Topic(NamedTuple):
    """Words of one subject. ``things`` are countable nouns with a plural in -s."""

    name: str
    things: tuple[str, ...]
    qualities: tuple[str, ...]
    acts: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


TOPICS = (
    Topic(
        "gardening",
        _words(
            "orchard, hedge, greenhouse, seedling, trellis, compost heap, flower bed, plum tree"
        ),
        _words("overgrown, sheltered, fragrant, neglected, sunlit, well-drained"),
        _words("pruned, watered, replanted, fenced, harvested, dug over"),
    ),
    Topic(
        "railways",
        _words("locomotive, signal box, viaduct, goods wagon, platform, timetable, tunnel, siding"),
        _words("narrow-gauge, abandoned, punctual, steam-driven, single-track, crowded"),
        _words("repaired, inspected, electrified, closed, extended, repainted"),
    ),
    Topic(
        "astronomy",
        _words("telescope, comet, observatory, mirror, star chart, crater, satellite, eclipse"),
        _words("distant, faint, spherical, newly discovered, slowly turning, remote"),
        _words("observed, photographed, catalogued, calibrated, measured, predicted"),
    ),
    Topic(
        "cooking",
        _words("recipe, dumpling, saucepan, market stall, oven, spice jar, pancake, stew"),
        _words("fragrant, inexpensive, old-fashioned, bitter, slow-cooked, crisp"),
        _words("seasoned, simmered, tasted, baked, served, written down"),
    ),
    Topic(
        "public health",
        _words("clinic, vaccine, survey, water pump, nurse, hospital ward, questionnaire, village"),
        _words("rural, underfunded, careful, preventive, temporary, well-staffed"),
        _words("funded, evaluated, reopened, supplied, visited, documented"),
    ),
    Topic(
        "computing",
        _words("database, compiler, network cable, queue, processor, backup, server, spreadsheet"),
        _words("outdated, distributed, reliable, slow, encrypted, carefully tested"),
        _words("replaced, debugged, measured, rewritten, restarted, documented"),
    ),
    Topic(
        "seafaring",
        _words("lighthouse, harbour, fishing boat, anchor, chart, sail, rope, storm"),
        _words("weather-beaten, deep, sheltered, treacherous, freshly painted, shallow"),
        _words("sighted, repaired, moored, abandoned, charted, salvaged"),
    ),
    Topic(
        "music",
        _words("violin, choir, rehearsal, concert hall, melody, drum, manuscript, organ"),
        _words("solemn, out-of-tune, celebrated, unfinished, cheerful, difficult"),
        _words("rehearsed, tuned, recorded, transcribed, performed, restored"),
    ),
)

PEOPLE = _words(
    "Margaret Ellison, Tomas Berg, Aisha Rahman, Daniel Okafor, Lucia Ferrara, Henrik Dahl, "
    "Priya Nair, Samuel Whitlock, Ingrid Voss, Mateo Alvarez, Naomi Tanaka, Peter Kowalski, "
    "Grace Abernathy, Omar Haddad, Clara Jansen, Victor Lemaire"
)

PLACES = _words(
    "Ashford, Little Marsh, Port Devlin, Kirkhaven, Santa Rosa, Oldenburg, Elmswood, Novara, "
    "Whitcombe, Lindqvist Bay, Castle Row, Redwater, Tamarack, Saint Aubin, Hollow Bridge, "
    "Mirandela"
)

TIMES = _words(
    "in the spring of 1911, shortly before the war, last autumn, after a long winter, "
    "during the second week of March, within a few months, at the end of the century, "
    "early one morning, some years later, over the following decade"
)

OPENINGS = (
    "What is a {quality} {thing}?",
    "Why was the {other} {act}?",
    "Name {number} uses of a {quality} {other}.",
    "Who {act} the {thing} in {place}?",
    "Explain to {person} how a {thing} differs from a {other}.",
    "Write a short letter from {person} to {friend} about the {quality} {thing} in {place}.",
    "Summarize what is known about the {thing} of {place} in two sentences.",
    "{number} {other}s were {act} in {place}. How would you tell {person} about it?",
    "Give {number} reasons why the {quality} {thing} in {place} should be {act}.",
    "{person} has {number} {thing}s and gives {friend} half of them. How many are left?",
    "Describe a day in the life of {person}, who works with {topic} in {place}.",
    "Compare the {thing} and the {other} as tools for beginners in {topic}.",
    "In {place} people say that a {quality} {thing} brings luck. Invent the story behind it.",
    "Suggest a title for a book by {person} on {topic} in {place}.",
    "What should {person} check before the {thing} in {place} is {act}?",
    "Rewrite this as a headline: the {quality} {thing} of {place} was {act} {time}.",
)

SENTENCES = (
    "The {thing} in {place} was {act} {time}, although nobody had asked for it.",
    "{person} remembered the {quality} {thing} and the {other} that stood beside it.",
    "According to {person}, only {number} of the {thing}s had ever been {act}.",
    "It was {friend} who first suggested that the {other} could be {act} without much expense.",
    "Visitors who came to {place} {time} were surprised by how {quality} everything looked.",
    "By then the {other} had been {act} twice, and the bill came to {number} hundred pounds.",
    "There are {number} records of a {quality} {thing} in {place}, and most of them disagree.",
    "The council argued about the {thing} for {number} weeks before anything was {act}.",
    "Nothing about the {other} was unusual, except that {person} had paid for it.",
    "Those who know {topic} well will tell you that a {quality} {thing} is seldom an accident.",
    "When the {thing} was finally {act}, {friend} wrote to {person} with the news.",
    "A {quality} {other} needs more attention than a new one, but it also teaches more.",
    "{time_first}, the people of {place} began to take an interest in {topic}.",
    "Some of the {other}s were sold, others were {act}, and one is still kept in {place}.",
    "{person} and {friend} could not agree whether the {thing} or the {other} came first.",
    "The report lists {number} {thing}s, of which {smaller} were described as {quality}.",
    "As far as anyone can tell, the road from {place} was built for the sake of the {thing}.",
    "In a letter written {time}, {friend} called it the most {quality} {other} in the country.",
    "Few events in the history of {topic} have been so often {act} and so little understood.",
    "Even so, the {thing} remained {quality}, and the {other} was soon forgotten.",
)

QUESTIONS = (
    "Question: according to the text, who remembered the {thing}, and why did it matter? Answer:",
    "Question: how many {thing}s does the text mention, and where were they? Answer:",
    "Summarize the text above for a reader who knows nothing about {topic}.",
    "List the people named above and say in one sentence what each of them did.",
    "Question: what happened in {place}, and what became of the {other}? Answer:",
)

FILLERS = (
    " Why?",
    " Explain.",
    " Be brief.",
    " Use plain words.",
    " Think step by step.",
    " Thanks!",
)


_PASSAGE_FROM_TOKENS = 120
"""Length in tokens from which a prompt is a titled text with a final question; below, a task."""

_TITLE = "{number} notes on the {quality} {thing} of {place}, collected by {person}"


def write_prompt(seed: str, target_tokens: int, tokenize: Tokenize) -> str:
    """Return a prompt of about ``target_tokens``: a few more or less, never less than a sentence.

    The same seed, target and tokenizer give the same text; another seed gives other first words.
    """
    draws = random.Random(seed)
    topic = draws.choice(TOPICS)
    if target_tokens < _PASSAGE_FROM_TOKENS:
        text = _sentence(draws, topic, OPENINGS)
        body = _grown(text, " ", draws, topic, target_tokens, tokenize)
        return _filled(body, draws, target_tokens, tokenize)
    question = "\n\n" + _sentence(draws, topic, QUESTIONS)
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
    tokenize: Tokenize,
) -> str:
    """Add sentences, in paragraphs, until the next one would exceed the target."""
    parts = [text]
    num_tokens = len(tokenize(text))
    left_in_paragraph = draws.randint(4, 7)
    while True:
        piece = separator + _sentence(draws, topic, SENTENCES)
        num_tokens += len(tokenize(piece))
        if num_tokens > target_tokens:
            return "".join(parts)
        parts.append(piece)
        left_in_paragraph -= 1
        separator = " " if left_in_paragraph else "\n\n"
        if not left_in_paragraph:
            left_in_paragraph = draws.randint(4, 7)


def _filled(text: str, draws: random.Random, target_tokens: int, tokenize: Tokenize) -> str:
    """Add short exclamations up to the target, since sentences do not come in every length."""
    fillers = list(FILLERS)
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
    person, friend = draws.sample(PEOPLE, 2)
    time = draws.choice(TIMES)
    number = draws.randint(3, 96)
    text = draws.choice(patterns).format(
        topic=topic.name,
        thing=thing,
        other=other,
        quality=draws.choice(topic.qualities),
        act=draws.choice(topic.acts),
        person=person,
        friend=friend,
        place=draws.choice(PLACES),
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and its length by the tokenizer that it was chosen with."""

    text: str
    num_tokens: int


def prompts(
    kind: str,
    count: int,
    min_tokens: int,
    max_tokens: int,
    seed: int,
    tokenize: Tokenize,
    data: Path | None = None,
) -> list[Prompt]:
    """Return ``count`` different prompts of ``min_tokens`` to ``max_tokens`` tokens.

    Texts of other lengths are skipped, except that LongBench texts that are too long lose their
    middle, as LongBench itself does it. Equal arguments give equal prompts.

    Args:
        kind: alpaca or longbench, from the files in ``data``, or synthetic.
    """
    draws = random.Random(f"{seed} {kind}")
    if kind == "synthetic":
        fitting = _synthetic(count, min_tokens, max_tokens, seed, draws, tokenize)
    else:
        fitting = _fitting(kind, min_tokens, max_tokens, draws, tokenize, data)
    found = list(islice(fitting, count))
    assert len(found) == count, f"{len(found)} of {count} {kind} prompts have these lengths"
    return found


def _fitting(
    kind: str,
    min_tokens: int,
    max_tokens: int,
    draws: random.Random,
    tokenize: Tokenize,
    data: Path | None,
) -> Iterator[Prompt]:
    entries = [entry for file in dataset_files(kind, data) for entry in read_entries(file)]
    texts = list({entry.text: None for entry in entries if entry.text is not None})
    draws.shuffle(texts)
    for text in texts:
        num_tokens = len(tokenize(text))
        if kind == "longbench" and num_tokens > max_tokens:
            text = without_middle(text, draws.randint(min_tokens, max_tokens), tokenize)
            num_tokens = len(tokenize(text))
        if min_tokens <= num_tokens <= max_tokens:
            yield Prompt(text, num_tokens)


def _synthetic(
    count: int,
    min_tokens: int,
    max_tokens: int,
    seed: int,
    draws: random.Random,
    tokenize: Tokenize,
) -> Iterator[Prompt]:
    """Yield synthetic prompts; an attempt that misses the lengths is replaced by another one."""
    seen: set[str] = set()
    for attempt in range(count * 50):
        target_tokens = draws.randint(min_tokens, max_tokens)
        text = write_prompt(f"{seed} {attempt}", target_tokens, tokenize)
        num_tokens = len(tokenize(text))
        if min_tokens <= num_tokens <= max_tokens and text not in seen:
            seen.add(text)
            yield Prompt(text, num_tokens)
