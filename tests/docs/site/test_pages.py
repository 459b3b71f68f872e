"""The text of the site's pages: links as the site has them, lists as mkdocs reads them."""

import re

import pytest

from configs.runtime.process import REPOSITORY
from docs.site import pages

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize(
    ("base", "link", "turned"),
    [
        (DOCS, "running.md#gpus", "running.md#gpus"),
        (DOCS, "../README.md", "index.md"),
        (DOCS, "../CONTRIBUTING.md#tests", "contributing.md#tests"),
        (DOCS, "../configs/environment.py", "source/configs/environment.py.md"),
        (DOCS, "../configs/schema.py", "fields.md"),
        (DOCS, "notebooks/demo.ipynb", "notebooks/demo.md"),
        (DOCS, "#an-anchor", "#an-anchor"),
        (DOCS, "https://arxiv.org/abs/2503.09516", "https://arxiv.org/abs/2503.09516"),
        (REPOSITORY, "docs/running.md#gpus", "running.md#gpus"),
        (REPOSITORY, "docs/images/demo-curve.png", "images/demo-curve.png"),
        (REPOSITORY, "CONTRIBUTING.md", "contributing.md"),
    ],
)
def test_a_link_leads_within_the_site(base: object, link: str, turned: str) -> None:
    assert pages.relinked(f"see [it]({link}).", base) == f"see [it]({turned})."


def test_a_source_that_is_linked_is_shown_whole() -> None:
    text = (DOCS / "records.md").read_text()
    assert pages.linked_sources(text, DOCS) == {"replay/ledger/image.py"}
    shown = pages.listing("replay/ledger/image.py")
    assert (REPOSITORY / "replay" / "ledger" / "image.py").read_text() in shown


def test_a_notebook_is_a_page_of_its_cells() -> None:
    shown = pages.notebook((DOCS / "notebooks" / "demo.ipynb").read_text())
    assert shown.startswith("# The loop from Python\n") and shown.count("```") % 2 == 0
    assert "\n```python\nSTEPS, QUESTIONS, SEED" in shown


def test_what_belongs_to_an_item_is_indented_as_mkdocs_wants_it() -> None:
    lists = "- one\n\n  ```\n  code\n  ```\n  - inner\n\nprose\n\n    code\n1. two\n   more\n"
    as_wanted = pages.indented(lists)
    assert "\n    ```\n    code\n    ```\n    - inner\n" in as_wanted
    assert as_wanted.endswith("\nprose\n\n    code\n1. two\n      more\n")


def test_a_block_of_code_stays_as_it_is() -> None:
    text = "```yaml\n- a\n  b: 1\n```\n"
    assert pages.indented(text) == text


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        "<img alt=x src=//example.org/x.png>",
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
        "a{background:url(https://example.org/x.png)}",
        '@import "https://example.org/x.css";',
        '<pre class="mermaid"><code>',
    ],
)
def test_a_foreign_request_is_found(text: str) -> None:
    assert pages.foreign_request(text)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://arxiv.org/abs/2503.09516">paper</a>',
        '<script src="assets/x.js"></script><img src=images/x.png>',
        "a{background:url(data:image/svg+xml,x)}",
        '<svg xmlns="http://www.w3.org/2000/svg">',
    ],
)
def test_a_link_that_is_clicked_is_no_request(text: str) -> None:
    assert not pages.foreign_request(text)


def test_each_page_is_in_the_site_s_navigation() -> None:
    named = set(re.findall(r": ([a-z_0-9/]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M))
    books = {f"notebooks/{book.stem}.md" for book in DOCS.glob("notebooks/*.ipynb")}
    made = {*pages.MADE_OF.values(), *pages.OF_THE_ROOT.values(), *books}
    assert named == made | {page.name for page in DOCS.glob("*.md")}
