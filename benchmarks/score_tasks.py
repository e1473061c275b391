"""Five small tasks with verifiers, which a chat model of 135 million parameters nearly can do.

    python -m benchmarks.score_tasks --rows 100 --seed 0 --out train.jsonl [--held-out test.jsonl]

writes conversations of a question and its answer, with the fields `task` and `answer`, by which
`right` judges a reply, and `correct` rewards it. Rows that are held out have another seed, and no
question that the training rows have.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.options import parse

_ONES, _TENS, _WORDS, _NAMES, _CITIES, _JOBS = (
    text.split()
    for text in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
        "banana strawberry letter balloon committee bookkeeper mississippi coffee tomorrow "
        "address necessary parallel success summer butter pepper cheese school village yellow "
        "valley window garden kitchen pillow hammer rabbit dinner mirror carrot bottle puzzle "
        "bubble cotton kettle muffin ribbon tunnel zipper saddle lesson runner winner teller "
        "seller miller barrel elephant giraffe octopus penguin dolphin hamster squirrel "
        "leopard flamingo crocodile umbrella keyboard computer telephone bicycle envelope "
        "calendar alphabet mountain island",
        "Maria Tom Aisha Chen Olga Pedro Fatima Lars Mei Ivan Sara David Nina Omar Ruth Kofi",
        "Oslo Lima Cairo Kyoto Paris Dublin Nairobi Quito Vienna Delhi Boston Perth Rome",
        "baker nurse pilot teacher farmer lawyer plumber singer chemist driver painter",
    )
)
_UNITS = {
    "kilometres": ("metres", 1000), "metres": ("centimetres", 100), "hours": ("minutes", 60),
    "minutes": ("seconds", 60), "kilograms": ("grams", 1000), "weeks": ("days", 7),
    "dozens": ("pieces", 12), "feet": ("inches", 12), "litres": ("millilitres", 1000),
}  # fmt: skip


def _in_words(number: int) -> str:
    if number < 20:
        return _ONES[number]
    ones = f"-{_ONES[number % 10]}" if number % 10 else ""
    return _TENS[number // 10 - 2] + ones


def _sum(draw: Random) -> tuple[str, str]:
    one, other = draw.randrange(10, 60), draw.randrange(2, 40)
    if draw.random() < 0.5:
        return f"What is {_in_words(one)} plus {_in_words(other)}?", str(one + other)
    return f"What is {_in_words(one + other)} minus {_in_words(other)}?", str(one)


def _letters(draw: Random) -> tuple[str, str]:
    word = draw.choice(_WORDS)
    letter = draw.choice(word + "aeioulnrstcdmp")
    return f'How many times is the letter {letter} in "{word}"?', str(word.count(letter))


def _units(draw: Random) -> tuple[str, str]:
    unit = draw.choice(sorted(_UNITS))
    smaller, factor = _UNITS[unit]
    number = draw.randrange(2, 100)
    return f"How many {smaller} are {number} {unit}?", str(number * factor)


def _sort(draw: Random) -> tuple[str, str]:
    numbers = draw.sample(range(1, 100), draw.randrange(3, 7))
    asked = ", ".join(map(str, numbers))
    return f"Sort from small to large: {asked}", ", ".join(map(str, sorted(numbers)))


def _json(draw: Random) -> tuple[str, str]:
    name, age = draw.choice(_NAMES), draw.randrange(18, 90)
    city, job = draw.choice(_CITIES), draw.choice(_JOBS)
    texts = (
        f"{name}, a {job} from {city}, is {age} years old.",
        f"At {age}, {name} works as a {job} in {city}.",
        f"The {job} {name} lives in {city} and is {age}.",
    )
    asked = f"Write as JSON with name, age, job and city: {draw.choice(texts)}"
    return asked, json.dumps({"name": name, "age": age, "job": job, "city": city})


TASKS = {"sums": _sum, "letters": _letters, "units": _units, "sorting": _sort, "json": _json}


def right(task: str, reply: str, answer: str) -> bool:
    """True if a reply has the answer: its last number, all its numbers in order, or its JSON."""
    if task == "json":
        found = re.search(r"\{.*?\}", reply, re.DOTALL)
        try:
            read = json.loads(found[0]) if found else None
        except ValueError:
            return False
        wanted = json.loads(answer)
        return isinstance(read, dict) and {k: str(v) for k, v in read.items()} == {
            k: str(v) for k, v in wanted.items()
        }
    if task == "sorting":
        return re.findall(r"\d+", reply) == answer.split(", ")
    numbers = re.findall(r"\d+(?:\.\d+)?", reply.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(answer)


def correct(
    completions: Sequence[Any], task: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """The reward of GRPO: 1 for a right reply, 0 for another."""
    replies = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(right(*each)) for each in zip(task, replies, answer, strict=True)]


def rows(
    per_task: int, seed: int, tasks: Sequence[str] = (), without: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """So many conversations of each task; no question stands twice, or in `without`."""
    draw, seen = Random(seed), {row["messages"][0]["content"] for row in without}
    made = []
    for task in tasks or TASKS:
        for _ in range(per_task):
            question, answer = TASKS[task](draw)
            while question in seen:
                question, answer = TASKS[task](draw)
            seen.add(question)
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            made.append({"messages": talk, "task": task, "answer": answer})
    draw.shuffle(made)
    return made


def write_rows(path: Path, made: Sequence[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def main() -> None:
    """Write training rows and, with other seeds, rows that are held out."""
    chosen = parse(__doc__, rows=100, seed=0, tasks="", out=Path("train.jsonl"), held_out=Path)
    tasks = [task for task in chosen.tasks.split(",") if task]
    made = rows(chosen.rows, chosen.seed, tasks)
    write_rows(chosen.out, made)
    if chosen.held_out is not None:
        others = rows(max(1, chosen.rows // 4), chosen.seed + 1_000_000, tasks, made)
        write_rows(chosen.held_out, others)


if __name__ == "__main__":
    main()
