"""`report.html` is one file that loads nothing, says all that `report.md` says, and shows data as text, not as tags."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from eval.run.metrics import METRICS
from eval.run.page import html, markdown
from eval.run.page.blocks import Aside, Code, Figure, Listing, Page, Paragraph, Section, Strong, Table, plain
from eval.run.publish import write

VOID = {"meta", "img", "wbr", "br", "hr", "link"}
HOSTILE = 'external:<script>alert("a & b")</script>|`x`'
SPEED = {"value": 1.5, "low": 1.25, "high": 1.75, "num_questions": 2}


class Reader(HTMLParser):
    """Tags with their attributes, text by innermost tag, and whether every tag is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.said = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("td", "th", "figcaption", "p", "li", "h1", "h2", "title"):
            self.texts.append((tag, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data
        if self.texts and "style" not in self.open:
            self.texts[-1] = (self.texts[-1][0], self.texts[-1][1] + data)

    def of(self, *tags):
        return [" ".join(text.split()) for tag, text in self.texts if tag in tags]


def group(**keys):
    return {**dict.fromkeys(METRICS), "num_questions": 2, "num_tokens": 64, **keys}


@pytest.fixture
def summary():
    difference = {
        "question_id": "<7>",
        "turn": 0,
        "position": 3,
        "token": 1,
        "reference": 2,
        "gap": 0.5,
        "is_tie": False,
    }
    ours = {
        "code": group(speedup=SPEED),
        "a <b>": group(),
        "overall": group(speedup=SPEED, stage_shares={"draft": 1.0}),
    }
    methods = [("plain", {"code": group(), "overall": group(tokens_per_second=SPEED)}), (HOSTILE, ours), ("del", ours)]
    return {
        "num_questions": 2,
        "baseline": "plain",
        "complete": False,
        "harness_share": 0.01,
        "harness_share_inside": None,
        "methods": [
            {"method": name, "groups": groups, "num_missing": int(name == "plain"), "errors": {"<e>": 1}}
            for name, groups in methods
        ],
        "check": [
            {"method": HOSTILE, "num_compared": 2, "num_different": 1, "num_ties": 0, "differences": [difference] * 9}
        ],
        "environment": {"model": "m<odel>", "command": 'run "x" & y'},
    }


@pytest.fixture
def page(summary, tmp_path):
    write(tmp_path, summary)
    return (tmp_path / "report.html").read_text("utf-8")


def test_the_page_loads_nothing_and_its_tags_are_balanced_and_have_ids_of_their_own(page):
    read = Reader(page)
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for key in ("src", "href", "srcset", "action"):
            assert re.match(r"data:|#", attributes.get(key, "#")), (tag, attributes)
    assert "url(" not in page and "@import" not in page and page.startswith("<!DOCTYPE html>")
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 5
    labels = [attributes["aria-labelledby"] for tag, attributes in read.tags if tag == "section"]
    assert labels == ids
    assert ("html", {"lang": "en"}) in read.tags and any(a.get("name") == "viewport" for _, a in read.tags)
    assert all(a["alt"] for tag, a in read.tags if tag == "img") and read.of("title") == ["Run report: m<odel>"]


def test_the_page_says_all_that_the_markdown_says(page, summary, tmp_path):
    read, text = Reader(page), (tmp_path / "report.md").read_text("utf-8")
    assert read.of("h2") == re.findall("^## (.*)$", text, re.MULTILINE) and read.of("h2")[0] == "Outputs"
    cells = [
        cell.strip().replace("\\|", "|").replace("\\<", "<")
        for line in text.split("\n")
        if line.startswith("|") and "---" not in line
        for cell in re.split(r"(?<!\\)\|", line)[1:-1]
    ]
    bare = [re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", cell) for cell in cells]
    assert read.of("td", "th") == bare and len(bare) > 40
    pictures = re.findall(r"!\[(.*)\]\(figures/\w+\.svg\)\n\n(.*)", text)
    captions = [f"{title}. {caption.replace('`', '')}" for title, caption in pictures]
    assert read.of("figcaption") == captions and len(captions) == 2
    assert sum(tag == "img" for tag, _ in read.tags) == 2
    said = " ".join(read.said.split())
    assert "Partial: up to 1 of 2 questions" in said and "Outputs differ from plain decoding's." in said
    for name in ("speedup", "mean_accepted_tokens"):
        assert f"{name}: {METRICS[name][1]}." in read.of("li")
    assert 'command: run "x" & y' in read.of("li") and "Questions without an answer" in said


def test_data_are_text_in_both_forms(page, tmp_path):
    assert "<script" not in page and "alert(&quot;a &amp; b&quot;)" in page
    assert HOSTILE in Reader(page).of("th")
    text = (tmp_path / "report.md").read_text("utf-8")
    lines = [line for line in text.split("\n") if "<" in line]
    for line in lines:  # outside code, every "<" is escaped
        assert "<" not in re.sub(r"\\<", "", re.sub(r"(`+).+?\1(?!`)", "", line)), line


def test_tables_scroll_in_their_own_box_and_pictures_shrink(page):
    read = Reader(page)
    before = [a for (tag, a), (after, _) in zip(read.tags, read.tags[1:], strict=False) if after == "table"]
    assert len(before) == 5 and all(a["class"] == "table" and a["tabindex"] == "0" for a in before)
    assert len({a["aria-label"] for a in before}) == 5
    style = html.STYLE.read_text("utf-8")
    rules = dict(re.findall(r"^(\S[^{]*?) \{(.*?)\}", style, re.MULTILINE | re.DOTALL))
    assert "overflow-x: auto" in rules[".table"] and "max-width: 100%" in rules[".table"]
    assert "width: 100%" in rules["img"] and "overflow-wrap" in rules["body"]
    assert "prefers-color-scheme: dark" in style


def test_every_kind_of_block_has_both_forms():
    blocks = [
        Paragraph(("a < b, ", Strong("c"), " ", Code("d`e"), Aside(" (f)"))),
        Listing([plain("one\n  two"), (Code("x_yyyy"),)]),
        Table(["name", "words"], [[(Code("a|b"),), ("word " * 20,)]]),
        Figure("pic", 'a "title"', ("caption <1>",), "<svg/>"),
    ]
    page = Page("Title & more", "", [Paragraph(("open",))], [Section("Part", blocks)])
    text = markdown.render(page)
    assert text.startswith(
        "# Title & more\n\nopen\n\n## Part\n\na \\< b, **c** `` d`e `` (f)\n\n- one two\n- `x_yyyy`\n\n"
    )
    assert "| name | words |\n| --- | ---: |\n| `a\\|b` | word" in text
    assert text.endswith('![a "title"](figures/pic.svg)\n\ncaption \\<1>\n')
    code = html.render(page)
    assert "<p>a &lt; b, <strong>c</strong> <code>d`e</code><small> (f)</small></p>" in code
    assert "<code>x_<wbr>yyyy</code>" in code and '<td class="words">' in code and '<th scope="row">' in code
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+" alt="a &quot;title&quot;"' in code
    assert "<title>Title &amp; more</title>" in code
    Reader(code)


def test_what_is_in_a_table_stays_in_its_line():
    table = Table(["name", "long\r\n texts"], [[(Code("a\nb"), " ", Aside("(1\n\n2)")), ("| c\td\u2028e\n",)]])
    assert markdown.render(Page("T", "", [table], [])) == (
        "# T\n\n| name | long texts |\n| --- | ---: |\n| `a b` (1 2) | \\| c d e |\n"
    )


def test_halves_of_letters_do_not_stop_the_report(tmp_path, summary):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "grid.json").write_text(json.dumps({"study": "grid", "error": "odd \ud800 letter"}))
    assert "odd ? letter" in write(tmp_path, summary)
