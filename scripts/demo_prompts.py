"""The prompts of the demo, generated: a regular domain of four families, and general questions.

Owns the wording. `gsm_symbolic` comes from reasoning-gym 0.1.25 (Apache-2.0; `pip install --no-deps
reasoning-gym==0.1.25`), everything else is written here. Never asks a model.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul Rosa Sam Tina Victor"
)
_CITIES = _words("Oslo Paris Lima Cairo Tokyo Rome Berlin Madrid Dublin Vienna Prague Boston Denver Sydney Lisbon")
_JOBS = _words("nurse teacher baker pilot farmer lawyer chef painter driver writer doctor plumber")
_ITEMS = _words("lamp chair desk kettle jacket backpack helmet guitar camera blanket ladder mirror")
_COLORS = _words("red blue green black white yellow brown grey")
_UNITS = (
    "kilometers meters",
    "meters centimeters",
    "hours minutes",
    "minutes seconds",
    "feet inches",
    "yards feet",
    "kilograms grams",
    "liters milliliters",
    "weeks days",
    "days hours",
    "dollars cents",
    "years months",
)
_TOPICS = _words(
    "gravity volcanoes bees bread rivers chess coffee cats moonlight rain snow bridges maps clocks trains salt glass"
    " whales forests magnets paper mountains deserts hearts sleep honey islands wind stars ice bicycles cheese"
    " libraries lightning oceans potatoes robots soap spiders sunlight tea trees wheels wolves wool yeast"
)
_QUESTIONS = (
    "Explain in one sentence what {} can teach us.",
    "Explain {} in one sentence, as to a child.",
    "Name one surprising fact about {}.",
    "Why do people care about {}? Keep it short.",
    "Write one sentence about {}.",
    "Give two words that describe {}, and say why.",
    "Is it possible to live without {}? Answer briefly.",
    "Write a title for a book about {}.",
    "What should a beginner know first about {}?",
    "Ask me a question about {}.",
    "How would a poet describe {} in two lines?",
    "What did people long ago believe about {}?",
)


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt; `key` is what it may not share with a prompt held out: its template and the numbers in it."""

    category: str
    text: str
    key: str


def gsm_symbolic(seed: int) -> Iterator[DemoPrompt]:
    """Word problems of about 85 templates, with fresh names and numbers; the template's number is in the key."""
    module = _reasoning_gym("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic")
    problems = module.GSMSymbolicDataset(module.GSMSymbolicDatasetConfig(seed=seed, size=4000))
    for template, problem in zip(problems.task_indices, problems, strict=False):
        yield _prompt("gsm_symbolic", problem["question"], template)


def rectangles(seed: int) -> Iterator[DemoPrompt]:
    """Area and perimeter of rectangles of 2 to 40 cm."""
    sizes = list(product(range(2, 41), repeat=2))
    Random(seed).shuffle(sizes)
    for length, width in sizes:
        text = f"A rectangle is {length} cm long and {width} cm wide. Find its area and its perimeter."
        yield _prompt("rectangles", text, 0)


def units(seed: int) -> Iterator[DemoPrompt]:
    """Conversions from a larger unit to a smaller one."""
    pairs = list(product(enumerate(_UNITS), range(2, 100)))
    Random(seed).shuffle(pairs)
    for (template, names), amount in pairs:
        larger, smaller = names.split()
        yield _prompt("units", f"Convert {amount} {larger} to {smaller}. Show the steps.", template)


def records(seed: int) -> Iterator[DemoPrompt]:
    """Sentences about a person or a thing, to be written as JSON."""
    random = Random(seed)
    while True:
        if random.random() < 0.5:
            keys = "name, age, city, job and salary"
            who = f"{random.choice(_NAMES)} is {random.randint(18, 80)} years old, lives in {random.choice(_CITIES)}"
            about = f"{who} and works as a {random.choice(_JOBS)} for {random.randint(20, 90) * 100} dollars a month"
        else:
            keys = "item, color, price and stock"
            what = f"a {random.choice(_COLORS)} {random.choice(_ITEMS)} costs {random.randint(5, 300)} dollars"
            about = f"{what} and {random.randint(2, 90)} are left"
        yield _prompt("records", f"Write this as JSON with the keys {keys}: {about}.", len(keys))


def general(seed: int) -> Iterator[DemoPrompt]:
    """Short questions about everyday things; the key is the whole text."""
    pairs = list(product(_QUESTIONS, _TOPICS))
    Random(seed).shuffle(pairs)
    for question, topic in pairs:
        text = question.format(topic)
        yield DemoPrompt("general", text, text)


FAMILIES: dict[str, Callable[[int], Iterator[DemoPrompt]]] = {
    "gsm_symbolic": gsm_symbolic,
    "rectangles": rectangles,
    "units": units,
    "records": records,
    "general": general,
}


def distinct(family: str, seed: int, count: int) -> list[DemoPrompt]:
    """The first `count` prompts of a family with different keys; fewer where the family has no more."""
    found: dict[str, DemoPrompt] = {}
    for prompt in FAMILIES[family](seed):
        found.setdefault(prompt.key, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _prompt(category: str, text: str, template: int) -> DemoPrompt:
    numbers = " ".join(re.findall(r"\d+(?:[,./]\d+)*", text))
    return DemoPrompt(category, text, f"{category} {template}: {numbers}")


def _reasoning_gym(name: str) -> types.ModuleType:
    """Import one module of reasoning-gym, without the package's own imports of all its tasks and their needs."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("gsm_symbolic needs: pip install --no-deps reasoning-gym==0.1.25")
    root = next(iter(spec.submodule_search_locations))
    packages = [name.rsplit(".", depth)[0] for depth in range(name.count("."), 0, -1)]
    for package in [*packages, "reasoning_gym.coaching"]:
        bare = types.ModuleType(package)
        bare.__path__ = ["/".join([root, *package.split(".")[1:]])]
        sys.modules[package] = bare
    return importlib.import_module(name)
