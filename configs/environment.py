"""The section `environment`: the environment that a policy acts in. A leaf module."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from configs.prompts import BUDGET, FORCED_ANSWER
from configs.section import (
    REACHES_OUT,
    RUNS_CODE,
    NonNegative,
    Positive,
    Seconds,
    Section,
)

BUILT_IN = ("search_r1", "tool_call", "no_search", "rag")
BUILT_IN_TOOLS = ("visit", "python")
_ENTRY_POINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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


class EnvironmentConfig(Section, frozen=True):
    """The environment's name and settings (docs/environments.md). Raises ValueError for a name that
    is none, and for a template without its placeholder.
    """

    # Or tool_call, no_search, rag, or your own: "package.module:factory"
    name: Annotated[str, RUNS_CODE] = "search_r1"
    # visit, python, or your own: "package.module:function"
    tools: Annotated[tuple[str, ...], RUNS_CODE] = ()
    # MCP servers, all of whose tools are used: command lines, or http(s) URLs
    mcp: Annotated[tuple[str, ...], RUNS_CODE] = ()
    visit: VisitConfig = VisitConfig()
    python: PythonConfig = PythonConfig()
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
            if not server.strip():
                raise ValueError(
                    f"environment.mcp = {server!r}: name a server by its command line or URL"
                )
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
