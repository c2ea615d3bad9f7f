"""The report in a real browser: no errors, every figure is drawn, and a phone need not scroll sideways."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_records import evaluated

from alibi_lab.position_methods import LOOKS
from alibi_lab.records import Record
from alibi_lab.report.page import write_report

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

OVERFLOWING = """
const wide = document.documentElement.clientWidth + 1;
const inside = (element) => element.closest('.scroll');
return [...document.body.querySelectorAll('*')].filter((element) => !inside(element) && !element.closest('svg'))
  .filter((element) => element.getBoundingClientRect().right > wide).map((element) => element.outerHTML.slice(0, 80));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("chromium and chromedriver are not installed: the report is not opened in a browser")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(made_up, tmp_path_factory: pytest.TempPathFactory) -> Path:
    benchmark = Record(kind="benchmark", name="banded/8192/" + "x" * 80, config={}, metrics={"forward_ms": 12.5})
    records = made_up(methods=("none", "sinusoidal", "learned", "rotary", "t5", "alibi"), seeds=2)
    return write_report([*records, benchmark], tmp_path_factory.mktemp("page") / "report.html")


def _open(browser, page: Path, *, width: int, dark: bool = False, media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})
    browser.get(page.as_uri())


def _rgb(color: str) -> list[int]:
    """Red, green and blue of a color as the browser writes it, "rgb(r, g, b)"."""
    return [int(part) for part in re.findall(r"\d+", color)]


def test_nothing_fails_and_nothing_is_requested(browser, page: Path) -> None:
    browser.get_log("browser")
    browser.get_log("performance")
    _open(browser, page, width=1100)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert requested, "the log of requests is empty, so it proves nothing"
    assert [url for url in requested if not url.startswith("data:")] == [page.as_uri()]


def test_a_phone_scrolls_only_inside_tables(browser, page: Path) -> None:
    _open(browser, page, width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    assert browser.execute_script(OVERFLOWING) == []
    scrolling = (
        "return [...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    )
    assert browser.execute_script(scrolling) > 0
    smallest = "return Math.min(...[...document.querySelectorAll('svg text')].map((text) => text.getBoundingClientRect().height))"
    assert browser.execute_script(smallest) > 8


def test_the_table_of_slopes_fits_next_to_a_picture(browser, page: Path) -> None:
    _open(browser, page, width=1280)
    box = "const box = document.querySelector('[aria-label=Slopes]'); return [box.scrollWidth, box.clientWidth]"
    needed, given = browser.execute_script(box)
    assert needed == given > 0


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of every method on five tasks, the widest page."""
    shares = {"": (1.7, 2.6), "mqar": (1.0, 0.07), "needles": (0.97, 0.6), "copy": (0.95, 0.0), "flip-flop": (1.0, 1.0)}
    found = [evaluated(method, task, shares[task]) for method in LOOKS for task in shares]
    return write_report(found, tmp_path_factory.mktemp("judged") / "report.html")


@pytest.mark.parametrize(("width", "media"), [(390, ""), (680, "print")])
def test_a_referee_fits_a_phone_and_paper(browser, judged: Path, width: int, media: str) -> None:
    _open(browser, judged, width=width, media=media)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERFLOWING) == []
    cells = "return [...document.querySelectorAll('.heat td[style]')].map((cell) => cell.getBoundingClientRect().width)"
    widths = browser.execute_script(cells)
    assert len(widths) == len(LOOKS) * 10
    assert min(widths) > 20
    if media:
        right = browser.execute_script("return document.querySelector('.heat').getBoundingClientRect().right")
        assert right <= browser.execute_script("return document.documentElement.clientWidth")


def test_light_and_dark_are_readable(browser, page: Path, contrast) -> None:
    for dark in (False, True):
        _open(browser, page, width=1100, dark=dark)
        paper, *inks = browser.execute_script(
            "const probe = document.createElement('i'); document.body.append(probe);"
            "return ['paper', 'ink', 'muted', 'link', 'alibi', 'sinusoidal', 'rotary', 't5', 'learned', 'none'].map((name) => {"
            "probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; });"
        )
        for ink in inks:
            assert contrast(_rgb(ink), _rgb(paper)) >= 4.5, f"{ink} on {paper} is hard to read"
        stroke = "return getComputedStyle(document.querySelector('svg path[style*=\"stroke: var(--alibi)\"]')).stroke"
        assert browser.execute_script(stroke) == inks[3]
