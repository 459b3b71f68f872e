"""What a search of the live web must be told, and what would act on nothing there."""

import pytest

from configs.load import ConfigError, parse

LIVE = ("retrieval.kind=serper", "retrieval.live.price_usd=0.001", "retrieval.live.budget_usd=1")


def test_price_and_budget_are_enough() -> None:
    assert parse("", LIVE, "test").retrieval.is_live
    assert not parse("", (), "test").retrieval.is_live


def test_a_replay_needs_neither() -> None:
    asked = parse("", ["retrieval.kind=serpapi", "retrieval.live.replay=f"], "test").retrieval
    assert asked.is_live and asked.has_own_server and not asked.live.needs_key


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["retrieval.live.budget_usd=0"],
            r"live\.budget_usd = 0\.0: .* say what the run may spend",
        ),
        (["retrieval.live.price_usd=0"], r"live\.price_usd = 0\.0: .* what a request costs"),
        (["retrieval.live.price_usd=1e-12"], r"live\.price_usd = 1e-12"),
        (["retrieval.live.budget_usd=1e-4"], r"budget_usd = 0\.0001: less than one request costs"),
        (["retrieval.live.budget_usd=-1"], r"retrieval\.live\.budget_usd"),
        (["retrieval.live.budget_usd=.inf"], r"live\.budget_usd = inf: .* what the run may spend"),
        (["retrieval.live.price_usd=.inf"], r"live\.price_usd = inf: .* what a request costs"),
        (["retrieval.live.url=https://x:99999"], r"live\.url is no address: give one such as"),
        (
            ["retrieval.url=http://a:1", "retrieval.recorded=f"],
            r"or a server does: leave one of them empty",
        ),
        (["retrieval.kind=google_cse"], r"live\.engine_id = '': .*programmablesearchengine"),
        (["retrieval.top_k=11"], r"retrieval\.top_k = 11: .* at most 10 passages"),
        (["retrieval.index=i"], r"retrieval\.index = 'i' acts on nothing with retrieval\.kind"),
        (["retrieval.reranker=r"], r"retrieval\.reranker = 'r' acts on nothing"),
        (["retrieval.live.url=http://web:1"], r"live\.url = 'http://web:1': the key is shown"),
        (["retrieval.live.url=ftp://127.0.0.1"], r"live\.url = 'ftp://127\.0\.0\.1'"),
        (["retrieval.live.key_variable=a-b"], r"key_variable is no name of an environment"),
        (
            ["retrieval.live.key_file=f", "retrieval.live.key_variable=V"],
            r"live\.key_file = 'f' and retrieval\.live\.key_variable: .* leave one of them out",
        ),
        (
            ["retrieval.live.record=f", "retrieval.live.replay=g"],
            r"live\.record = 'f' and retrieval\.live\.replay = 'g': .* leave one out",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("", [*LIVE, *overrides], "test")


@pytest.mark.parametrize(
    "url",
    [
        "https://x?api_key=SECRET",
        "http://web?key=SECRET",
        "ftp://me:SECRET@web",
        "https://x#key=SECRET",
        "https://[x?key=SECRET",
        "https://me:SECRET\u2100@x",
    ],
)
def test_an_address_that_holds_a_secret_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"live\.url") as raised:
        parse("", [*LIVE, f"retrieval.live.url={url}"], "test")
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["https://gateway/search", "http://[::1]:8/s", "http://localhost:8"]
)
def test_a_provider_may_be_elsewhere(url: str) -> None:
    assert parse("", [*LIVE, f"retrieval.live.url={url}"], "test").retrieval.live.url == url
