"""The section `environment`: the environment that a policy acts in. A leaf module."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from configs.prompts import BUDGET, FORCED_ANSWER
from configs.retrieval import is_near
from configs.section import (
    NAMES_SECRET,
    OF_THE_MACHINE,
    REACHES_OUT,
    RUNS_CODE,
    NonNegative,
    Positive,
    Seconds,
    Section,
)

PROGRAM = "program"
BUILT_IN = ("search_r1", "tool_call", "no_search", "rag", PROGRAM)
BUILT_IN_TOOLS = ("visit", "python")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_OF_THE_PROTOCOL = ("accept", "connection", "content-", "host", "last-event", "mcp-", "transfer-")
_ENTRY_POINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_IN_A_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")
_GIVEN = ("OPENAI_", "FORAGE_")  # how the variables begin that every program is given


class VisitConfig(Section, frozen=True):
    """The bounds of the tool `visit`; of time: `tool_deadline_s`."""

    max_bytes: Positive = 1_000_000  # of a page, decompressed; the rest is not read
    redirects: NonNegative = 5  # that are followed
    private: Annotated[bool, REACHES_OUT] = False  # it may reach this machine and private networks


class PythonConfig(Section, frozen=True):
    """The limits of one program of the tool `python`."""

    cpu_s: Positive = 10  # of processor time
    wall_s: Seconds = 20.0  # of the clock
    memory_mb: Positive = 512  # of address space
    file_mb: Positive = 16  # of each file that it writes, its output included
    output_bytes: Positive = 20_000  # that are shown


class ProgramConfig(Section, frozen=True):
    """The program of `environment.name: program`, which answers a question by calls of the policy,
    and its limits. Raises ValueError for a program that is told in two ways, or in none of them.
    """

    command: Annotated[tuple[str, ...], RUNS_CODE] = ()  # its words, which no shell reads
    # In place of a command, a Python function: package.module:function, or FILE.py:function
    entry_point: Annotated[str, RUNS_CODE] = ""
    # Of the actor's environment variables, those that it is given beside HOME, PATH and the like
    variables: Annotated[tuple[str, ...], NAMES_SECRET] = ()
    at_once: Positive = 64  # programs in an actor; further rollouts wait for their turn
    deadline_s: Seconds = 180.0  # of a program; below actors.rollout_deadline_s
    grace_s: Seconds = 2.0  # between SIGTERM, at its deadline, and SIGKILL
    memory_mb: NonNegative = 4096  # of address space, for each of its processes; 0: no limit
    file_mb: Positive = 64  # of each file that it writes
    output_bytes: Positive = 65536  # of the end of what it prints, where its result is read
    # A program that exits with an error or is late: its lease fails, or is scored as unanswered
    failures: Literal["fail", "score"] = "fail"

    def __post_init__(self) -> None:
        point = self.entry_point
        if self.command and point:
            raise ValueError(
                f"environment.program.entry_point = {point!r}: environment.program.command names a "
                "program too: leave one of them out"
            )
        if self.command and not self.command[0]:
            raise ValueError(
                "environment.program.command = '': its first word is empty: name a program"
            )
        if point and not (_ENTRY_POINT.fullmatch(point) or _IN_A_FILE.fullmatch(point)):
            raise ValueError(
                f"environment.program.entry_point = {point!r}: name a function as "
                "package.module:function or FILE.py:function"
            )
        for name in self.variables:
            if not _VARIABLE.fullmatch(name) or name.startswith(_GIVEN):
                raise ValueError(
                    f"environment.program.variables = {name!r}: name a variable of the actors' "
                    f"environment, by none of its own names ({', '.join(_GIVEN)}…)"
                )


class GatewayConfig(Section, frozen=True):
    """The limits of one session of the gateway (docs/gateway.md)."""

    calls: Positive = 256  # of the policy, in all
    calls_at_once: Positive = 16  # requests in flight
    messages: Positive = 1024  # of one call
    body_bytes: Positive = 1_000_000  # of one call
    searches: Positive = 128  # in all; 64 at most between two calls


class McpKey(Section, frozen=True):
    """A key that an MCP server is given: a variable of the environment for a command, a header for
    a URL. Raises ValueError, which never holds what may be a key.
    """

    server: str  # as environment.mcp names it
    variable: str = ""  # of the actor's environment: a command gets it under this name
    header: str = ""  # of each request to a URL, from the variable or the file
    scheme: Literal["", "Bearer", "Basic", "Token"] = ""  # that stands before the key in a header
    file: str = ""  # 0600; holds the key of a header

    def __post_init__(self) -> None:
        where = f"environment.mcp_keys: server = {self.server!r}"
        if not self.server.startswith(("http://", "https://")):
            if not self.variable or self.header or self.scheme or self.file:
                raise ValueError(
                    f"{where}: a command takes variables of the environment and nothing else: "
                    "name one, variable: NAME"
                )
        elif not _HEADER.fullmatch(self.header):
            raise ValueError(
                f"{where}: a URL takes headers: name one, such as header: Authorization"
            )
        elif self.header.lower().startswith(_OF_THE_PROTOCOL):
            raise ValueError(
                f"{where}: header = {self.header!r} is the protocol's own: name another"
            )
        elif not (self.server.startswith("https://") or is_near(self.server)):
            raise ValueError(
                f"{where}: the key is shown there: give an https:// address, or an http:// one on "
                "this machine's loopback"
            )
        elif bool(self.variable) == bool(self.file):
            raise ValueError(
                f"{where}: header = {self.header!r}: its key is in a file of mode 0600 or in a "
                "variable of the environment: name one, file: FILE or variable: NAME"
            )
        if self.variable and not _VARIABLE.fullmatch(self.variable):
            raise ValueError(
                f"{where}: variable is no name of an environment variable: give the variable's "
                "name, never the key itself"
            )
        if self.file and not self.file.startswith("/"):
            raise ValueError(
                f"{where}: file is no absolute path: give the whole path of the file that holds "
                "the key, never the key itself"
            )


class EnvironmentConfig(Section, frozen=True):
    """The environment's name and settings (docs/environments.md). Raises ValueError for a name that
    is none, and for a template without its placeholder.
    """

    # Or tool_call, no_search, rag, program, or your own: "package.module:factory"
    name: Annotated[str, RUNS_CODE] = "search_r1"
    # visit, python, or your own: "package.module:function"
    tools: Annotated[tuple[str, ...], RUNS_CODE] = ()
    # MCP servers, all of whose tools are used: command lines, or http(s) URLs
    mcp: Annotated[tuple[str, ...], RUNS_CODE] = ()
    # Keys that these servers are given: what is named, never the key itself
    mcp_keys: Annotated[tuple[McpKey, ...], OF_THE_MACHINE, NAMES_SECRET] = ()
    visit: VisitConfig = VisitConfig()
    python: PythonConfig = PythonConfig()
    program: ProgramConfig = ProgramConfig()
    gateway: GatewayConfig = GatewayConfig()
    tool_deadline_s: Seconds = 30.0  # of one use of a tool
    tool_errors: Literal["tell", "fail"] = "tell"  # the policy; or fail the lease
    tool_limits: dict[str, Positive] = {}  # uses at once in an actor, by a tool's name
    close_deadline_s: Seconds = 10.0  # of an environment's `close`, at the end of its rollout
    tool_format: str = "auto"  # of tool_call's calls: hermes, llama3_json, or a parser of vLLM's
    # search_r1: one a line; further ones are not searched. As many as a turn's record holds.
    queries_per_turn: Annotated[int, Meta(ge=1, le=64)] = 1
    tell_budget: bool = False  # the policy reads how many searches are left
    budget_template: str = BUDGET  # with {searches}, how many are left
    force_answer: bool = False  # after the last search the environment opens the answer
    force_template: str = FORCED_ANSWER  # the end of the last search's observation
    system: str = ""  # the system message; empty: the environment's own

    def __post_init__(self) -> None:
        if self.name not in BUILT_IN and not _ENTRY_POINT.fullmatch(self.name):
            raise ValueError(
                f"environment.name = {self.name!r}: choose one of {', '.join(BUILT_IN)}, or name "
                "your own as package.module:factory"
            )
        if self.name == PROGRAM and not (self.program.command or self.program.entry_point):
            raise ValueError(
                "environment.name = 'program': no program is named: give "
                "environment.program.command=[PROGRAM,WORD] or "
                "environment.program.entry_point=FILE.py:function"
            )
        for tool in self.tools:
            if tool not in BUILT_IN_TOOLS and not _ENTRY_POINT.fullmatch(tool):
                raise ValueError(
                    f"environment.tools = {tool!r}: name a tool as package.module:function, or one "
                    f"of {', '.join(BUILT_IN_TOOLS)}"
                )
        if "python" in self.tools and self.python.wall_s > self.tool_deadline_s:
            raise ValueError(
                f"environment.python.wall_s = {self.python.wall_s:g} is above "
                f"environment.tool_deadline_s = {self.tool_deadline_s:g}, which would end a "
                "program's use before: lower the one or raise the other"
            )
        for server in self.mcp:
            _require_server(server)
        self._require_keys()
        if "{searches}" not in self.budget_template:
            raise ValueError(
                f"environment.budget_template = {self.budget_template!r}: it must contain "
                "{searches}"
            )
        if not self.force_template.rstrip().endswith("<answer>"):
            raise ValueError(
                f"environment.force_template = {self.force_template!r}: it must end with <answer>, "
                "which the policy closes"
            )

    def _require_keys(self) -> None:
        """Raise ValueError for a key of a server that is not used, or one that is given twice."""
        seen = set[tuple[str, str]]()
        for key in self.mcp_keys:
            if key.server not in self.mcp:
                raise ValueError(
                    f"environment.mcp_keys: server = {key.server!r}: environment.mcp names no such "
                    "server: write it as there"
                )
            name = key.header.lower() or key.variable
            if (key.server, name) in seen:
                raise ValueError(
                    f"environment.mcp_keys: server = {key.server!r}: {name!r} is given twice: keep "
                    "one"
                )
            seen.add((key.server, name))


def _require_server(spec: str) -> None:
    """Raise ValueError for an MCP server that is neither a command line nor a bare URL."""
    if not spec.strip():
        raise ValueError(f"environment.mcp = {spec!r}: name a server by its command line or URL")
    if spec.strip().lower().startswith(("http://", "https://")):
        if not spec.startswith(("http://", "https://")):
            raise ValueError(
                "environment.mcp: a URL begins with http:// or https://, in small letters and "
                "without a blank before it"
            )
        _require_bare(spec)


def _require_bare(url: str) -> None:
    """Raise ValueError, which never holds what may be a key, for a URL that holds more than an
    address.
    """
    try:
        parts = urlsplit(url)
        found = bool(parts.hostname) and parts.port != 0  # a port that is none raises
    except ValueError:
        parts, found = None, False
    if parts is None or not found:
        raise ValueError(
            "environment.mcp: a URL is no address: give one such as https://search.example/mcp"
        )
    if "?" in url or "#" in url or "@" in parts.netloc:
        raise ValueError(
            f"environment.mcp: the URL at {parts.hostname!r} holds a query, a fragment or a user's "
            "name, which would be recorded: give the address alone, and the key by "
            "environment.mcp_keys"
        )
