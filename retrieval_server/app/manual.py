"""The manual at `/docs`: the OpenAPI document as a page without scripts, of this server alone."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{background:#eee;padding:1em;overflow:auto}code{font-weight:bold}"
)
_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}


def render(spec: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The page of an OpenAPI document, and its headers."""
    title = escape(spec["info"]["title"])
    head = f"<title>{title}</title><style>{_STYLE}</style>"
    body = "".join([*_routes(spec["paths"]), *_schemas(spec["components"]["schemas"])])
    whole = '<p>The same for machines: <a href="openapi.json">openapi.json</a></p>'
    page = f'<!doctype html><html lang="en">{head}<h1>{title}</h1>{whole}{body}</html>\n'
    return page, _HEADERS


def _routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, told in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(told.get('description', ''))}</p>"
            if body := told.get("requestBody"):
                yield f"<p>Body:</p>{_shown(body)}"
            answers = told["responses"].items()
            rows = (f"<li>{status}: {escape(each['description'])}</li>" for status, each in answers)
            yield f"<ul>{''.join(rows)}</ul>"


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f"<h2>{escape(name)}</h2>{_shown(schema)}"


def _shown(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
