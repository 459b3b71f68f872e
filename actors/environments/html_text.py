"""The title and the text of an HTML page, in time that is linear in its length.

A page may be anybody's: Python's `html.parser` takes quadratic time over some and raises over
others. What the end of the page leaves open (a tag, a comment, a script) is left out, as browsers
do.
"""

import html
import re

_HIDDEN = ("script", "style", "noscript", "template", "svg", "title")
_MAIN, _BESIDE = ("main", "article"), ("nav", "header", "footer", "aside", "form")
_INLINE = (
    *("a", "abbr", "b", "bdi", "cite", "code", "em", "font", "i", "mark", "q", "s", "small"),
    *("span", "strong", "sub", "sup", "u"),
)
_ENOUGH = 200  # characters of a page's main part, for the rest to be left out
_NAME = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
_MARKUP = re.compile(r"<(?=[a-zA-Z/!?])")
_STOP, _QUOTE = re.compile("[>=]"), re.compile("\\s*([\"'])")
_RAW = {  # elements whose content is no markup
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE)
    for name in ("script", "style", "title", "textarea", "iframe")
}


def html_text(page: str) -> tuple[str, str]:
    """Return the title and the text of an HTML page: of its main part where it names one, else
    without menus, else all.
    """
    reader = _Reader(page)
    for wanted in ((True, False), (None, False)):
        text = reader.text(*wanted)
        if len(text) >= _ENOUGH:
            return reader.title, text
    return reader.title, reader.text(None, None)


def _tag_end(page: str, at: int) -> int:
    """Return where the tag ends that `at` lies in, -1 where it does not; a `>` in the quotes of a
    value ends none.
    """
    while (stop := _STOP.search(page, at)) is not None:
        at = stop.end()
        if stop[0] == ">":
            return at
        if (quote := _QUOTE.match(page, at)) is not None:
            at = max(quote.end(), page.find(quote[1], quote.end()) + 1)
    return -1


def _passed(page: str, begin: int) -> int:
    """Return where a comment or declaration ends that begins there, -1 where it does not."""
    comment = page.startswith("<!--", begin)
    end = page.find("-->", begin + 2) if comment else page.find(">", begin)
    return end if end < 0 else end + (3 if comment else 1)


class _Reader:
    """Collects stretches of text, each with whether it stands in the main part, and beside it."""

    def __init__(self, page: str) -> None:
        self._depth = dict.fromkeys((*_HIDDEN, *_MAIN, *_BESIDE), 0)
        self._stretches: list[tuple[bool, bool, list[str]]] = []
        self._enter()
        self._title: list[str] = []
        at = 0
        while at >= 0 and (markup := _MARKUP.search(page, at)) is not None:
            self._read_text(page[at : markup.start()])
            at = self._read_markup(page, markup.start())
        if at >= 0:
            self._read_text(page[at:])

    @property
    def title(self) -> str:
        """The page's title, on one line."""
        return " ".join("".join(self._title).split())

    def text(self, main: bool | None, beside: bool | None) -> str:
        """What stands so; None: in either. Lines are stripped, empty ones left out."""
        kept = [
            "".join(pieces)
            for in_main, is_beside, pieces in self._stretches
            if main in (None, in_main) and beside in (None, is_beside)
        ]
        lines = (" ".join(line.split()) for line in "".join(kept).split("\0"))
        return "\n".join(line for line in lines if line)

    def _read_markup(self, page: str, begin: int) -> int:
        """Read the tag, comment or declaration there, and the content that is no markup. Return
        where the page goes on, -1 where all of it is read.
        """
        found = _NAME.match(page, begin)
        if found is None:
            return _passed(page, begin)
        end = _tag_end(page, found.end())
        if end < 0:
            return end
        closes, name = bool(found[1]), found[2].lower()
        opens = not closes and not page.endswith("/>", begin, end)
        if name in self._depth:
            self._depth[name] = max(0, self._depth[name] + opens - closes)
            self._enter()
        if name not in _INLINE:
            self._kept.append("\0")
        if opens and name in _RAW:
            closing = _RAW[name].search(page, end)
            self._read_text(page[end : closing.start() if closing else None])
            return closing.start() if closing else -1
        return end

    def _read_text(self, text: str) -> None:
        """Keep a piece of text that is shown."""
        if self._depth["title"] and not self._depth["svg"]:
            self._title.append(_unescaped(text))
        elif text and not self._hidden:
            self._kept.append(_unescaped(text).replace("\0", " "))

    def _enter(self) -> None:
        """Begin a stretch, where what it stands in has changed."""
        self._hidden = self._inside(_HIDDEN)
        stands = (self._inside(_MAIN), self._inside(_BESIDE))
        if not self._stretches or self._stretches[-1][:2] != stands:
            self._stretches.append((*stands, []))
        self._kept = self._stretches[-1][2]

    def _inside(self, tags: tuple[str, ...]) -> bool:
        return any(self._depth[tag] for tag in tags)


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character's number of thousands of digits
        return text
