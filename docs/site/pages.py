"""The text of the site's pages: their links, lists and listings, and requests that must not be."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_THE_ROOT = {  # files beside docs/ that are pages of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
MADE_OF = {"configs/schema.py": "fields.md"}  # files that a page of the site tells
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_ITEM = re.compile(r"(-|\d+\.) ")
_LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml", ".sh": "bash"}
_FOREIGN = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'\s>]*"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\shref=[\"']?(?:https?:)?//[^\"'\s>]*"
    r"|url\([\"']?(?:https?:)?//[^)]*|@import\s+[\"'](?:https?:)?//[^\"']*"
    r"|class=[\"']?mermaid"  # the theme fetches what draws it
)


def foreign_request(text: str) -> str:
    """The first thing that a page or style sheet would ask another server for; '' for none."""
    found = _FOREIGN.search(text)
    return found[0] if found else ""


def home(uri: str) -> Path:
    """The folder that the links of a page begin at."""
    return ROOT if uri in OF_THE_ROOT.values() else ROOT / "docs"


def relinked(text: str, base: Path) -> str:
    """A page's text with its links as the site has them; `base`: where they begin."""

    def turned(link: re.Match[str]) -> str:
        path = _path(link[1], base)
        target = (OF_THE_ROOT | MADE_OF).get(path) or path.removeprefix("docs/")
        if target == path:
            target = source_page(path)
        return f"]({target.replace('.ipynb', '.md')}{link[2] or ''})"

    return _LINK.sub(turned, text)


def indented(text: str) -> str:
    """A page's text with what belongs to an item of a list indented by four, as mkdocs wants it."""
    lines, in_list, in_fence = [], False, False
    for line in text.splitlines():
        bare = line.lstrip()
        if line.startswith("```"):
            in_fence = not in_fence
        if not in_fence and bare:
            in_list = bool(_ITEM.match(bare)) or (in_list and bare != line)
        lines.append(" " * (len(line) - len(bare)) + line if in_list and not in_fence else line)
    return "\n".join(lines) + "\n"


def linked_sources(text: str, base: Path) -> set[str]:
    """The files of the repository, no pages of the site, that a page links to."""
    paths = {_path(link[1], base) for link in _LINK.finditer(text)}
    shown = {*OF_THE_ROOT, *MADE_OF}
    return {path for path in paths - shown if not path.startswith("docs/")}


def _path(target: str, base: Path) -> str:
    """The path in the repository that a link means."""
    return (base / target).resolve().relative_to(ROOT).as_posix()


def notebook(text: str) -> str:
    """A page of a notebook's cells."""
    said = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        said.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(said) + "\n"


def source_page(path: str) -> str:
    """The page that shows a source file."""
    return f"source/{path}.md"


def listing(path: str) -> str:
    """A page of the file's text. Raises FileNotFoundError."""
    fence, file = "`" * 6, ROOT / path
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{file.read_text()}{fence}\n"
