"""The documentation as a site: it builds without a warning, needs no network, and its search finds things."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
BUILD_TIMEOUT_S = 600  # on a busy machine; alone it takes about 10 s
PHONE, DESK = (375, 740), (1280, 900)
pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning of Sphinx fails the build, as in `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    started = time.process_time()
    done = subprocess.run(
        [*command, "-d", str(folder / ".doctrees"), str(ROOT / "docs"), str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert time.process_time() - started < 60
    return folder / "html"


def test_every_page_is_built_and_none_loads_anything_from_elsewhere(site: Path) -> None:
    sources = [page for kind in ("*.md", "*.ipynb") for page in (ROOT / "docs").rglob(kind)]
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in sources}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert pages <= built
    for page in built:
        text = (site / page).read_text()
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\"", text)
        loads += re.findall(r"<link[^>]*\srel=\"(?:stylesheet|icon|preload)[^>]*\shref=\"([^\"]+)\"", text)
        assert loads
        assert not [address for address in loads if re.match(r"(?:https?:)?//", address)], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet


def test_a_notebook_is_a_page_with_its_code_and_a_reference_without_module_is_a_link(site: Path) -> None:
    notebook = (site / "notebooks" / "first_hour.html").read_text()
    assert "The first hour" in notebook and notebook.count('class="cell docutils') > 4
    assert 'href="errors.html#hrl.single_controller.worker_errors.PlacementError"' in "".join(
        page.read_text() for page in (site / "api").glob("*.html")
    )


def test_public_names_are_in_the_api(site: Path) -> None:
    import hrl

    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    for name in hrl.__all__:
        if name != "__version__":
            assert f'id="hrl.{name}"' in text, name


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    """A page of a headless browser that may load files of the site and nothing else."""
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        opened = browser.new_page()
        opened.route(re.compile("^https?:"), lambda route: route.abort())
        yield opened
        browser.close()


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [
        ("truncation", "metrics.html"),
        ("optim.lr", "configuration.html"),
        ("lr", "configuration.html"),
        ("holds checkpoints of an earlier run", "troubleshooting.html"),
        ("register_adv_est", "api/algorithms.html"),
    ],
)
def test_the_search_finds(site: Path, page: Page, words: str, leads_to: str) -> None:
    page.goto(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    found = page.eval_on_selector_all("#search-results ul.search li a", "all => all.map(one => one.href)")
    assert any(leads_to in address for address in found[:12]), found[:12]


@pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", ["index", "quickstart", "metrics", "configuration", "concepts/the-step", "api/python"])
def test_a_page_fits_its_window(site: Path, page: Page, name: str, width: tuple[int, int]) -> None:
    page.set_viewport_size({"width": width[0], "height": width[1]})
    page.goto((site / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width[0]
