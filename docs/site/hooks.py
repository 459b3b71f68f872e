"""What mkdocs calls while it builds the site: pages are added, links turned, requests refused."""

from pathlib import Path
from typing import Any

import fields
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pages import (
    OF_THE_ROOT,
    ROOT,
    foreign_request,
    home,
    indented,
    linked_sources,
    listing,
    notebook,
    relinked,
    source_page,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here, and each source file that a page links to."""

    def add(uri: str, text: str) -> None:
        files.append(File.generated(config, uri, content=text))

    told = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    add("fields.md", fields.page(told))
    add("site.css", (ROOT / "docs" / "site" / "site.css").read_text())
    for name, uri in OF_THE_ROOT.items():
        told[uri] = (ROOT / name).read_text()
        add(uri, relinked(told[uri], ROOT))
    for book in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        add(f"notebooks/{book.stem}.md", notebook(book.read_text()))
    linked = {uri: linked_sources(text, home(uri)) for uri, text in told.items()}
    for path in sorted(set().union(*linked.values())):
        add(source_page(path), listing(path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page of docs/ that lead out of it."""
    made = page.file.generated_by is not None
    return indented(markdown if made else relinked(markdown, ROOT / "docs"))


def on_post_build(config: Any, **_: Any) -> None:
    """Fail where a page would ask another server for anything."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (found := foreign_request(file.read_text())):
            raise PluginError(f"{file} would ask another server: {found}")
