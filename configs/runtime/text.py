"""Text that is not trusted: of policies, passages, questions, logs and other people's records."""

# Characters that a terminal obeys, and that nobody sees: controls, marks that show what follows in
# another order, and marks without width, in which words can be hidden. Joiners (U+200C, U+200D)
# stay: words of some languages need them.
_LEFT_OUT = dict.fromkeys(
    code
    for codes in (
        range(32), range(127, 160), (0x00AD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F),
        range(0x202A, 0x202F), range(0x2060, 0x2070), (0xFEFF,), range(0xFFF9, 0xFFFC),
        range(0xE0000, 0xE1000),
    )
    for code in codes
    if chr(code) not in "\n\t"
)  # fmt: skip
_INSTEAD = _LEFT_OUT | {
    0x2028: "\n", 0x2029: "\n",  # breaks of lines
    **dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"),  # halves of a character
}  # fmt: skip


def clean(text: str) -> str:
    """The text without what a terminal would obey or nobody would see, but for line breaks and
    tabs; with a mark for what no file takes.
    """
    return text.translate(_INSTEAD)
