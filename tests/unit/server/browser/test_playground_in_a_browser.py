"""The playground page as a person uses it, in a real browser; skipped where there is none."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import CHROMIUM, Page, open_page
from scripted_engine import LiveServer, Script, ScriptedEngine, live_server, tiny_tokenizer, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

TURNS = "[...document.querySelectorAll('.turn')].map((turn) => [turn.dataset.who, turn.textContent])"
STATUS = "document.querySelector('#status')?.textContent"
ATTACHED = "[...document.querySelectorAll('#attached li')].map((chip) => chip.firstChild.textContent)"
REFUSED = "document.querySelector('#attached-refused').textContent"
MEASURES = "document.querySelector('#measures').textContent"

ESCAPE = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def visit(page: Page, server: LiveServer) -> None:
    page.log.clear()
    page.command("Page.navigate", url=server.url + "/")
    wait_until(lambda: page.evaluate("document.querySelector('#status')?.textContent.startsWith('Ready')"))


class Proxy(ThreadingHTTPServer):
    """Before a server, which it has under a path of its own: passes what is asked, but refuses the API with a status of
    its own while it has one."""

    def __init__(self, server: LiveServer, path: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind = server
        self.path = path
        self.url = f"http://127.0.0.1:{self.server_port}{path}/"
        self.refusal: int | None = None


class Passing(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        path = self.path.removeprefix(self.server.path)
        refusal = self.server.refusal if path.startswith("/v1") else None
        if not self.path.startswith(self.server.path):
            refusal = 404
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {"content-type": self.headers.get("content-type", "")}
        with self.server.behind.client() as client:
            reply = client.request(self.command, path, content=body, headers=headers)
        self.send_response(refusal or reply.status_code)
        self.send_header("content-type", reply.headers["content-type"])
        self.end_headers()
        self.wfile.write(b"<html>no</html>" if refusal else reply.content)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxied(server: LiveServer, path: str = "") -> Iterator[Proxy]:
    with Proxy(server, path) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def ask(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#message').focus()")
    page.type(text)
    page.press_enter()


def test_a_question_is_answered_and_measured(page: Page, server: LiveServer) -> None:
    visit(page, server)
    ask(page, "hi <b>there</b>")
    wait_until(lambda: "generated" in page.evaluate(MEASURES))
    assert page.evaluate(TURNS) == [["user", "hi <b>there</b>"], ["assistant", "hello world"]]
    ask(page, "again")
    wait_until(lambda: len(server.engine.requests) == 2)
    wait_until(lambda: "generated" in page.evaluate(MEASURES))
    assert len(page.evaluate(TURNS)) == 4
    assert page.problems() == []


def choose(page: Page, **contents: str) -> None:
    files = json.dumps({name.replace("_", "."): text for name, text in contents.items()})
    page.evaluate(f"""{{
        const chosen = new DataTransfer();
        for (const [name, text] of Object.entries({files}))
            chosen.items.add(new File([Uint8Array.from(text, (byte) => byte.charCodeAt(0))], name));
        document.querySelector('#files').files = chosen.files;
        document.querySelector('#files').dispatchEvent(new Event('change'));
    }}""")


def test_files_go_in_front_of_the_question(page: Page, server: LiveServer) -> None:
    visit(page, server)
    choose(page, a_txt="one\n", b_md="```\ntwo\n```", c_bin="\xff\xfe", d_txt="three")
    wait_until(lambda: len(page.evaluate(ATTACHED)) == 3)
    assert page.evaluate(REFUSED) == "Not a text file in UTF-8: c.bin"
    page.evaluate("document.querySelector('#attached li:last-child button').click()")
    assert page.evaluate(ATTACHED) == ["a.txt (4 characters)", "b.md (11 characters)"]
    asked = len(server.engine.requests)
    ask(page, "what?")
    wait_until(lambda: "generated" in page.evaluate(MEASURES))
    assert page.evaluate(TURNS)[0] == ["user", "a.txt (4 characters)\nb.md (11 characters)\nwhat?"]
    assert page.evaluate(ATTACHED) == []
    sent = tiny_tokenizer().decode(server.engine.requests[asked].prompt_token_ids)
    assert "a.txt:\n```\none\n```\n\nb.md:\n````\n```\ntwo\n```\n````\n\nwhat?" in sent
    assert page.problems() == []


def test_files_of_a_refused_question_are_still_there(page: Page, server: LiveServer) -> None:
    visit(page, server)
    page.evaluate("document.querySelector('#temperature').value = 3")
    choose(page, a_txt="one\n")
    wait_until(lambda: page.evaluate(ATTACHED))
    ask(page, "hot")
    wait_until(lambda: page.evaluate("document.querySelector('.turn.failed') !== null"))
    assert page.evaluate(ATTACHED) == ["a.txt (4 characters)"]
    assert page.evaluate("document.querySelector('#message').value") == "hot"


def test_a_file_of_fences_alone_is_refused_by_the_server_and_not_lost(page: Page, server: LiveServer) -> None:
    visit(page, server)
    choose(page, a_md="```\n" * 200_000)
    wait_until(lambda: page.evaluate(ATTACHED))
    ask(page, "what?")
    wait_until(lambda: page.evaluate("document.querySelector('.turn.failed') !== null"))
    assert page.evaluate(ATTACHED) == ["a.md (800,000 characters)"]
    assert page.evaluate("document.querySelector('#message').value") == "what?"
    assert "context" in page.evaluate(TURNS)[0][1]


def paste(page: Page, name: str, kind: str, **texts: str) -> bool:
    """A file, and what else the clipboard has. Returns whether the page took it, so that no text is pasted."""
    taken: bool = page.evaluate(f"""{{
        const clipboard = new DataTransfer();
        for (const [type, text] of Object.entries({json.dumps(texts)})) clipboard.setData(`text/${{type}}`, text);
        clipboard.items.add(new File(["some"], "{name}", {{ type: "{kind}" }}));
        const options = {{ clipboardData: clipboard, bubbles: true, cancelable: true }};
        !document.querySelector('#message').dispatchEvent(new ClipboardEvent("paste", options));
    }}""")
    return taken


def test_a_pasted_file_is_attached_but_no_picture_of_text_that_is_there(page: Page, server: LiveServer) -> None:
    visit(page, server)
    assert not paste(page, "image.png", "image/png", plain="A1\tB1", html="<table>")  # of Excel or Word
    assert paste(page, "a.txt", "text/plain")
    wait_until(lambda: page.evaluate(ATTACHED))
    assert paste(page, "b.txt", "text/plain", plain="b.txt")  # of the Finder
    wait_until(lambda: len(page.evaluate(ATTACHED)) == 2)
    assert page.evaluate(ATTACHED) == ["a.txt (4 characters)", "b.txt (4 characters)"]
    assert page.evaluate(REFUSED) == ""


@pytest.mark.parametrize("stop", ["document.querySelector('#stop').click()", ESCAPE], ids=["button", "escape"])
def test_an_answer_can_be_stopped(page: Page, server: LiveServer, stop: str) -> None:
    server.engine.script = Script(ends=False)
    visit(page, server)
    ask(page, "for ever")
    wait_until(lambda: page.evaluate("document.querySelector('.turn.assistant')?.textContent.length > 5"))
    page.evaluate(stop)
    wait_until(lambda: page.evaluate(MEASURES) == "Stopped.")
    wait_until(lambda: len(server.engine.aborted) == 1)
    assert page.evaluate("document.querySelector('#stop').hidden") is True


def test_an_answer_of_nothing_is_said_to_be_one(page: Page, server: LiveServer) -> None:
    server.engine.script = Script(text=b"")
    visit(page, server)
    ask(page, "nothing?")
    wait_until(lambda: page.evaluate(MEASURES) == "The model answered nothing.")
    assert page.evaluate("document.querySelector('#message').value") == "nothing?"


def test_a_refused_question_goes_back_to_where_it_can_be_changed(page: Page, server: LiveServer) -> None:
    visit(page, server)
    page.evaluate("document.querySelector('#temperature').value = 3")
    ask(page, "hot")
    wait_until(lambda: page.evaluate("document.querySelector('.turn.failed') !== null"))
    ((who, message),) = page.evaluate(TURNS)
    assert who == "failed"
    assert "temperature" in message
    assert page.evaluate("document.querySelector('#message').value") == "hot"
    page.evaluate("document.querySelector('#temperature').value = 0")
    ask(page, "")
    wait_until(lambda: "generated" in page.evaluate(MEASURES))
    assert [who for who, _ in page.evaluate(TURNS)] == ["user", "assistant"]  # the complaint is out of date


def test_a_server_with_a_key_asks_for_it(page: Page) -> None:
    with live_server(api_key="right") as server:
        page.command("Page.navigate", url=server.url + "/")
        wait_until(lambda: page.evaluate("document.querySelector('#key-dialog')?.open"))
        assert page.evaluate("document.querySelector('#key-refused').hidden") is True
        for key in ("wrong", "right"):
            page.evaluate("document.querySelector('#key').focus()")
            page.type(key)
            page.press_enter()
            if key == "wrong":
                wait_until(lambda: page.evaluate("!document.querySelector('#key-refused').hidden"))
        wait_until(lambda: page.evaluate("document.querySelector('#status').textContent.startsWith('Ready')"))


def test_a_key_can_be_given_when_a_question_is_sent(page: Page) -> None:
    with live_server(api_key="right") as server:
        page.command("Page.navigate", url=server.url + "/")
        wait_until(lambda: page.evaluate("document.querySelector('#key-dialog')?.open"))
        page.evaluate("document.querySelector('#key-dialog').close()")
        wait_until(lambda: page.evaluate(f"{STATUS}.startsWith('This server asks for an API key')"))
        ask(page, "hello")
        wait_until(lambda: page.evaluate("document.querySelector('#key-dialog').open"))
        page.evaluate("document.querySelector('#key').focus()")
        page.type("right")
        page.press_enter()
        wait_until(lambda: "generated" in page.evaluate(MEASURES))
        assert page.evaluate(TURNS) == [["user", "hello"], ["assistant", "hello world"]]
        assert page.evaluate("document.querySelector('#model').value") == "tiny"
        assert page.evaluate(f"{STATUS}.startsWith('Ready')")


def test_a_question_waits_for_a_server_that_is_starting(page: Page) -> None:
    engine = ScriptedEngine()
    engine.load.clear()
    with live_server(wait=False, engine=engine) as server:
        page.command("Page.navigate", url=server.url + "/")
        wait_until(lambda: page.evaluate(f"{STATUS}?.startsWith('The model is loading')"))
        ask(page, "early")
        wait_until(lambda: page.evaluate(MEASURES) == "The model is still loading. Trying again…")
        engine.load.set()
        wait_until(lambda: "generated" in page.evaluate(MEASURES))
        assert page.evaluate(TURNS) == [["user", "early"], ["assistant", "hello world"]]


def test_a_question_that_waits_can_be_stopped(page: Page) -> None:
    engine = ScriptedEngine()
    engine.load.clear()
    with live_server(wait=False, engine=engine) as server:
        page.command("Page.navigate", url=server.url + "/")
        wait_until(lambda: page.evaluate(f"{STATUS}?.startsWith('The model is loading')"))
        ask(page, "early")
        wait_until(lambda: "Trying again" in page.evaluate(MEASURES))
        page.evaluate("document.querySelector('#stop').click()")
        wait_until(lambda: page.evaluate(MEASURES) == "Stopped.")
        assert page.evaluate("document.querySelector('#message').value") == "early"


def test_half_a_token_is_refused_and_not_passed_over(page: Page, server: LiveServer) -> None:
    visit(page, server)
    page.evaluate("document.querySelector('#max-tokens').value = '1.5'")
    ask(page, "hi")
    wait_until(lambda: page.evaluate("document.querySelector('.turn.failed')") is not None)
    assert "max_tokens" in page.evaluate("document.querySelector('.turn.failed').textContent")


@pytest.mark.parametrize("status", [502, 503])
def test_a_page_waits_for_a_server_behind_a_proxy_to_come_back(page: Page, server: LiveServer, status: int) -> None:
    with proxied(server) as proxy:
        proxy.refusal = status
        page.command("Page.navigate", url=proxy.url)
        wait_until(lambda: page.evaluate(STATUS) == f"The server replied {status}. Trying again…")
        proxy.refusal = None
        wait_until(lambda: page.evaluate(f"{STATUS}.startsWith('Ready')"))


def test_a_page_notices_a_server_that_went_away(page: Page, server: LiveServer) -> None:
    with proxied(server) as proxy:
        page.command("Page.navigate", url=proxy.url)
        wait_until(lambda: page.evaluate(f"{STATUS}?.startsWith('Ready')"))
    ask(page, "anybody?")
    wait_until(lambda: page.evaluate(f"{STATUS}.startsWith('The server cannot be reached')"))
    assert page.evaluate(TURNS) == [["failed", "The server cannot be reached."]]
    assert page.evaluate("document.querySelector('#message').value") == "anybody?"


def test_a_page_may_lie_under_a_path_of_a_proxys_own(page: Page, server: LiveServer) -> None:
    with proxied(server, "/models/small") as proxy:
        page.command("Page.navigate", url=proxy.url)
        wait_until(lambda: page.evaluate(f"{STATUS}?.startsWith('Ready')"))
        ask(page, "hi")
        wait_until(lambda: "generated" in page.evaluate(MEASURES))
        assert page.evaluate("getComputedStyle(document.body).display") == "flex"


def test_a_model_that_is_no_longer_served_is_no_longer_offered(page: Page, server: LiveServer) -> None:
    visit(page, server)
    page.evaluate("document.querySelector('#model').append(new Option('gone', 'gone', true, true))")
    ask(page, "hi")
    wait_until(lambda: page.evaluate("document.querySelector('#model').value") == "tiny")
    [[who, said]] = page.evaluate(TURNS)
    assert who == "failed"
    assert "gone" in said
    assert page.evaluate("document.querySelector('#message').value") == "hi"


@pytest.fixture(scope="module")
def long_named_server() -> Iterator[LiveServer]:
    name = "ft:SmolLM2-135M-Instruct:the-capital-of-zembla-in-six-questions:23636e15bec3"
    with live_server(served_model_name=f"tiny,{name}") as server:
        yield server


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_overflows(page: Page, long_named_server: LiveServer, width: int) -> None:
    page.command("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    visit(page, long_named_server)
    assert page.evaluate("document.querySelector('#model').options.length") == 2
    wide = "[...document.querySelectorAll('body *')].filter((it) => it.getBoundingClientRect().right > innerWidth)"
    assert page.evaluate(f"{wide}.map((it) => it.id || it.tagName)") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
