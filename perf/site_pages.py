"""A hook of mkdocs: the site of `make site` is made of the pages as they are, and of the files that they lead to.

A page of docs/ keeps its place. Another file of the repository that a page links to, or that those link to, stands
below `source/`: Markdown as a page, code and settings in a page that shows them, a folder as a list of its files.
Lists are indented as Python-Markdown wants them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_DOCS = ROOT / "docs"

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_FENCE = re.compile(r" *(```|~~~)")

#: Shown as code, by the language that a suffix or name stands for.
_CODE = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "sh",
    ".cu": "cuda",
    ".service": "ini",
    ".csv": "text",
    ".txt": "text",
    "Dockerfile": "dockerfile",
    "Makefile": "make",
}


def place(path: Path) -> str:
    """Returns where a file or folder of the repository stands among the sources of the site."""
    if path.is_relative_to(_DOCS) and path.is_file():
        return path.relative_to(_DOCS).as_posix()
    inside = f"source/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{inside}/index.md"
    return inside if path.suffix in {".md", ".svg"} else f"{inside}.md"


def targets(text: str, page: Path) -> Iterator[tuple[str, Path]]:
    """Yields each link of a page to a file or folder of the repository, as written, with its path."""
    for line in _plain_lines(text):
        for link in _LINK.findall(line):
            path = (page.parent / link).resolve()
            if path.is_relative_to(ROOT) and path.exists():
                yield link, path


def _plain_lines(text: str) -> Iterator[str]:
    fenced = False
    for line in text.splitlines():
        fenced ^= bool(_FENCE.match(line))
        if not fenced:
            yield line


def sources() -> dict[str, Path]:
    """Returns all files and folders of the site, by place: docs/, and those that its pages lead to."""
    left, found = sorted(_DOCS.rglob("*.md")), dict[str, Path]()
    while left:
        path = left.pop()
        if place(path) in found:
            continue
        found[place(path)] = path
        if path.suffix == ".md":
            left += [each for _, each in targets(path.read_text(encoding="utf-8"), path)]
    return found


def written(path: Path) -> str:
    """Returns the Markdown that shows a file or folder of the repository which is no page itself."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n# `{name}`\n\n"
    if path.is_dir():
        return head + "".join(f"- `{each.relative_to(path).as_posix()}`\n" for each in _files_below(path))
    language = _CODE.get(path.suffix) or _CODE.get(path.name, "text")
    return f"{head}````{language}\n{path.read_text(encoding='utf-8')}````\n"


def _files_below(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts)


def for_python_markdown(text: str) -> str:
    """Returns a page whose lists begin after a blank line and are indented by four, which GitHub does not need."""
    lines, fenced, inside = list[str](), False, 0
    for line in text.splitlines():
        item = None if fenced else _ITEM.match(line)
        if item is not None:
            if lines and lines[-1].strip() and not inside:
                lines.append("")
            inside = len(item[0])
        elif inside and line.strip() and not line.startswith(" " * inside):
            inside = 0 if not fenced and (not lines[-1].strip() or line[0] in "#|<") else inside
        elif inside and line.strip():
            line = " " * (4 - inside) + line
        fenced ^= bool(_FENCE.match(line))
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that docs/ does not have."""
    from mkdocs.structure.files import File

    for name, path in sources().items():
        if files.get_file_from_path(name) is not None:
            continue
        if path.suffix in {".md", ".svg"}:
            files.append(File.generated(config, name, abs_src_path=str(path)))
        else:
            files.append(File.generated(config, name, content=written(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to the place of its file."""
    origin = sources().get(page.file.src_uri)
    if origin is None or origin.suffix != ".md":
        return markdown
    folder = Path(page.file.src_uri).parent
    moved = {link: os.path.relpath(place(path), folder) for link, path in targets(markdown, origin)}
    text = _LINK.sub(lambda link: moved.get(link[1], link[1]), markdown)
    return for_python_markdown(text)
