"""What a person gets to see: the page stands alone, the tables have the figures, texts have exact lengths."""

import io
import random
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from scripted_engine import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from server.bench.lengths import Lengths
from server.bench.metrics import Distribution, measure
from server.bench.outcome import PROMPT_MISMATCH, Outcome
from server.bench.report_html import MOST_POINTS, cdf, page, thin, thin_steps
from server.bench.report_table import latency_table, notes, totals_table
from server.bench.svg import Chart, draw
from server.bench.text_prompts import ExactText, InexactTokenizerError
from server.bench.workload import RandomPrompts, Turn

METRICS = ("ttft", "tpot", "itl", "e2el")
OUTCOMES = [Outcome(10, 0.0, 0.0, [(0.25, 1), (0.5, 1), (1.0, 1)], 3), Outcome(10, 1.0, 1.0, [(1.5, 1)], 1)]


class Page(HTMLParser):
    """Tags that are open, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page(measure(OUTCOMES, 2.0, {"ttft": 400.0}), OUTCOMES, {"model_id": "<b>&"}, METRICS, [99.0])
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert not {"src", "href"} & {name for name, _ in parsed.attributes}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "light-dark" in text


def test_a_page_of_failures_only_is_a_page() -> None:
    failed = [Outcome(1, 0.0).fail(PROMPT_MISMATCH, "2 instead of 1")]
    text = page(measure(failed, 1.0, {}), failed, {}, METRICS, [99.0])
    assert Page(text).open == []
    assert "2 instead of 1" in text
    assert "nothing was measured" in text
    assert "nan" not in text


def test_a_cdf_rises_to_its_share() -> None:
    chart = cdf("TTFT, ms", measure(OUTCOMES, 2.0, {}).distributions["ttft"])
    assert chart.points == [(250.0, 50.0), (500.0, 100.0)]  # the slowest of a few is one of them
    many = cdf("TTFT, ms", Distribution(tuple(map(float, range(1000)))))
    assert many.points[-1] == (994.0, 99.5)  # of many it would squeeze the others to the left


def test_many_points_become_few_with_both_ends() -> None:
    points = [(float(x), float(x)) for x in range(10_000)]
    assert len(thin(points)) == MOST_POINTS
    assert (thin(points)[0], thin(points)[-1]) == (points[0], points[-1])


@pytest.mark.parametrize("count", [0, 1, MOST_POINTS, MOST_POINTS + 1, 7 * MOST_POINTS + 3])
def test_peaks_of_steps_stay(count: int) -> None:
    steps = [(float(number), 50 if number == count // 3 else number % 2) for number in range(count)]
    thinned = thin_steps(steps)
    assert len(thinned) <= MOST_POINTS + 1
    assert thinned == sorted(set(thinned))
    assert max(thinned, key=lambda point: point[1], default=None) == max(steps, key=lambda p: p[1], default=None)
    assert thinned[-1:] == steps[-1:]
    if count <= MOST_POINTS:
        assert thinned == steps


def test_steps_are_drawn_as_steps() -> None:
    corners = re.search(r'polyline class="line" points="([^"]*)"', draw(Chart("t", "x", "y", [(0, 1), (1, 2)], True)))
    assert corners is not None
    assert len(corners[1].split()) == 3


def test_the_last_second_is_drawn_too() -> None:
    """A run of less than one second has no other: its chart was empty."""
    short = [Outcome(10, 0.0, 0.0, [(0.25, 1), (0.5, 1)], 2)]
    text = page(measure(short, 0.5, {}), short, {}, METRICS, [99.0])
    corners = re.search(r'Output tokens a second.*?polyline class="line" points="([^"]*)"', text)
    assert corners is not None
    begin, *others = (corner.split(",") for corner in corners[1].split())
    assert float(begin[0]) < float(others[-1][0])
    assert {height for _, height in others} == {begin[1]}


def test_the_tables_say_the_figures() -> None:
    found = measure(OUTCOMES, 2.0, {"ttft": 400.0})
    text = io.StringIO()
    console = Console(width=120, file=text)
    console.print(totals_table(found))
    console.print(latency_table(found.distributions, METRICS, [90.0]))
    lines = {line.split("  ")[0]: line.split() for line in text.getvalue().splitlines()}
    assert lines["goodput, requests/s"][-1] == "0.50"
    assert lines["output tokens/s"][-1] == "2.0"
    assert lines["TTFT, ms"][-3:] == ["375.00", "375.00", "475.00"]


def test_notes_say_what_a_reader_must_know() -> None:
    late = Outcome(1, 0.0, 5.0, [(6.0, 1)], 3, chunks_are_tokens=False)
    failed = Outcome(1, 0.0).fail(PROMPT_MISMATCH, "2 instead of 1")
    joined = "\n".join(notes(measure([late, failed], 6.0, {})))
    assert "1 failed: the server counted another prompt length (2 instead of 1)" in joined
    assert "ITL is a chunk's" in joined
    assert "5000 ms or more after their time" in joined
    assert notes(measure(OUTCOMES, 2.0, {})) == []


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "t0": 1} | {f"w{number}": number for number in range(2, 200)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_texts_are_encoded_to_exactly_their_length() -> None:
    tokenizer = word_tokenizer()
    text = ExactText(tokenizer)
    workload = RandomPrompts(5, Lengths(40), Lengths(3), prefix_len=10, num_turns=2)
    for conversation in workload.conversations(text.vocabulary, random.Random(0)):
        for turn in text.as_text(conversation):
            assert isinstance(turn.prompt, str)
            assert len(tokenizer(turn.prompt)["input_ids"]) == turn.prompt_tokens
        assert [turn.prompt_tokens for turn in conversation] == [50, 93]


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(InexactTokenizerError, match="send token ids instead"):
        ExactText(tiny_tokenizer())


def test_words_that_merge_are_noticed() -> None:
    text = ExactText(word_tokenizer())
    text.words[5] = "w5"  # without its space it becomes one word with the one before it
    with pytest.raises(InexactTokenizerError, match="2 tokens became 1"):
        text.as_text((Turn([4, 5], 2, 1),))
