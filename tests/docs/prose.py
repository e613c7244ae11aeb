"""Counts words that name no thing, in all prose of each package, and holds them to `MOST`.

    python -m tests.docs.prose            print the counts, and fail if one is too high
    python -m tests.docs.prose --check    print only counts that are too high

Prose is docstrings, comments, texts of errors, help texts, and pages of documentation outside their code.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Words by the name of their count, which is per 1,000 words. Python's None does not count.
WORDS: Mapping[str, re.Pattern[str]] = {
    "what": re.compile(r"\b[Ww]hat(ever)?\b"),
    "nobody": re.compile(r"\b([Nn]obody|[Nn]othing|[Nn]o one|none)\b"),
    "who": re.compile(r"\b[Ww]ho(ever)?\b"),
    "whichever": re.compile(r"\b([Ww]hichever|that which)\b"),
}
#: First words of docstrings, which are counted: a method begins with a verb, a class with an article and a noun.
OPENINGS = frozenset(
    {"What", "Whatever", "Who", "Whoever", "Where", "Whether", "Which", "Whichever", "Of", "As", "How"}
)

#: The highest counts, of words per 1,000 and of openings.
MOST: Mapping[str, float] = {"what": 4.0, "nobody": 2.0, "who": 0.2, "whichever": 0.5, "openings": 0.0}

_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.).*$", re.M)


def packages() -> dict[str, list[Path]]:
    """Returns the files of each package of kvmover, of its modules beside them, and of the documentation."""
    code = ROOT / "kvmover"
    found = {each.parent.name: sorted(each.parent.rglob("*.py")) for each in sorted(code.glob("*/__init__.py"))}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("perf/*.md"), *code.rglob("*.md")]
    # What programs write is counted where it comes from.
    written = {"api.md", "configuration.md", "metrics.md"}
    return {
        **found,
        "modules": sorted(code.glob("*.py")),
        "pages": [each for each in pages if each.name not in written],
    }


def counts(name: str) -> dict[str, float]:
    """Returns the counts of a package, by the names of `MOST`."""
    texts, first_words = list[str](), list[str]()
    for path in packages()[name]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            texts.append(_FENCE.sub("", text))
            continue
        docstrings = [_DOCTEST.sub("", each) for each in _docstrings(ast.parse(text))]
        first_words += [words[0] for each in docstrings if (words := re.findall(r"[A-Za-z']+", each))]
        texts += [*docstrings, *_comments(text), *messages(ast.parse(text))]
    return rates(texts, first_words)


def rates(texts: Sequence[str], first_words: Sequence[str]) -> dict[str, float]:
    """Returns how often each of `WORDS` is in 1,000 words of texts, and how many first words are among `OPENINGS`.

    >>> rates(["What is kept is what nobody reads."], ["What", "Returns"])["what"]
    285.7142857142857
    """
    prose = "\n".join(texts).replace("`none`", "")  # the value of a setting
    total = max(1, len(re.findall(r"[A-Za-z']+", prose)))
    found = {kind: 1000 * len(words.findall(prose)) / total for kind, words in WORDS.items()}
    return {**found, "openings": sum(word in OPENINGS for word in first_words)}


def too_high(counted: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a line for each count above `MOST`, of the counts of each package."""
    return [
        f"{name}: {count:.1f} of {kind!r}, more than {MOST[kind]}"
        for name, found in counted.items()
        for kind, count in found.items()
        if round(count, 1) > MOST[kind]
    ]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (said := ast.get_docstring(node)):
            yield said


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#: ")


def messages(tree: ast.Module) -> Iterator[str]:
    """Yields texts of what is raised, and of `help=`."""
    for node in ast.walk(tree):
        inside: ast.AST | None = None
        if isinstance(node, ast.Raise):
            inside = node.exc
        elif isinstance(node, ast.keyword) and node.arg == "help":
            inside = node.value
        for each in ast.walk(inside) if inside else ():
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value


def main(arguments: list[str]) -> int:
    """Run the command. Returns its exit code."""
    counted = {name: counts(name) for name in packages()}
    for name, found in counted.items() if not arguments else ():
        sys.stdout.write("  ".join([f"{name:12}", *(f"{kind} {count:4.1f}" for kind, count in found.items())]) + "\n")
    lines = too_high(counted)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
