"""The text of a completion while its tokens come: whole characters, up to a stop of the request.

The policy stops by itself at a stop's text; where it could not (a stop that stands within a token,
or is spelt by other tokens than its own), the completion is cut here, behind the token that
completes the stop. What is cut off was sampled, is on no record, and nobody has read it.
"""

from collections.abc import Callable, Collection, Sequence

from actors.prompt import Tokens

_HALF = "\ufffd"  # what decoding makes of a character whose other tokens are still to come
_CONTEXT = 6  # tokens of the prompt, by which the first of a completion is spaced
Decode = Callable[[Sequence[int]], str]


class Text:
    """A completion's text so far. `full`: that of all its tokens; `whole`: up to its stop, as the
    request wants it; `kept`: how many tokens it has, the one that completes a stop included;
    `stopped`: a stop was found.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Tokens,
        stops: Sequence[str],
        ends: Collection[int],
        include_stop: bool = False,
    ) -> None:
        """`ends`: the tokens that end a completion, which have no text unless they are a stop."""
        self._decode, self._stops, self._include = decode, stops, include_stop
        self._silent = {each for each in ends if decode([each]) not in stops}
        self._ids: list[int] = prompt[-_CONTEXT:].tolist()
        self._start, self._until = 0, len(self._ids)  # the piece that was decoded last
        self.full = ""
        self.kept = 0
        self.stopped = False
        self._end: int | None = None  # of what the request wants

    @property
    def whole(self) -> str:
        """All that the request wants so far."""
        return self.full[: self._end]

    @property
    def certain(self) -> int:
        """How many characters no later token can take away: what may begin a stop is not."""
        if self._end is not None:
            return self._end
        most = max(map(len, self._stops), default=1) - 1
        for size in range(min(most, len(self.full)), 0, -1):
            tail = self.full[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(self.full) - size
        return len(self.full)

    def put(self, tokens: Sequence[int]) -> None:
        """Take further tokens, up to the one that completes a stop."""
        if self.stopped:
            return
        if len(tokens) > 1 and self._stops:
            before = self._ids[:], self._start, self._until, self.full, self.kept
            self._take(tokens)
            if not self.stopped and not self._new():
                return  # all of it is told, and no stop in it
            self._ids, self._start, self._until, self.full, self.kept = before
            self.stopped, self._end = False, None
            for token in tokens:
                if not self.stopped:
                    self._take([token])
        else:
            self._take(tokens)

    def finish(self) -> None:
        """Take what is left of a character that will not be whole any more."""
        if not self.stopped:
            self._tell(self._new())

    def _take(self, tokens: Sequence[int]) -> None:
        self.kept += len(tokens)
        self._ids += [each for each in tokens if each not in self._silent]
        piece = self._new()
        if piece and not piece.endswith(_HALF):
            self._start, self._until = self._until, len(self._ids)
            self._tell(piece)

    def _tell(self, piece: str) -> None:
        reach = max(map(len, self._stops), default=0) + len(piece)
        self.full += piece
        begin = max(0, len(self.full) - reach)
        found = [(at, stop) for stop in self._stops if (at := self.full.find(stop, begin)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            self.stopped, self._end = True, at + len(stop) * self._include

    def _new(self) -> str:
        before = self._decode(self._ids[self._start : self._until])
        return self._decode(self._ids[self._start :])[len(before) :]
