"""Text that is not trusted: of policies, passages, questions, logs and other people's records."""

# Characters that a terminal obeys: controls, and marks that show what follows in another order.
_OBEYED = {
    code: None
    for codes in (
        range(32), range(127, 160), (0x061C, 0x200E, 0x200F), range(0x202A, 0x202F),
        range(0x2066, 0x206A),
    )
    for code in codes
    if chr(code) not in "\n\t"
}  # fmt: skip


def clean(text: str) -> str:
    """The text without what a terminal would obey, but for line breaks and tabs."""
    return text.translate(_OBEYED)
