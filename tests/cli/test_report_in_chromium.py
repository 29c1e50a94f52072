"""The report page in a real browser: no console error, no missing image, no request."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsparse.report import write_report
from tests.helpers.look_at_report import VIEWS, chromium, find_chromium, look
from tests.helpers.report_dict import example_report


@pytest.mark.skipif(find_chromium() is None, reason="needs a machine with Chromium")
def test_every_view_is_without_fault(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(example_report(), page)
    program = find_chromium()
    assert program is not None
    with chromium(program) as browser:
        browser.attach()
        assert {view: look(browser, page, view, None) for view in VIEWS} == {
            view: [] for view in VIEWS
        }


@pytest.mark.skipif(find_chromium() is None, reason="needs a machine with Chromium")
def test_faults_are_seen(tmp_path: Path) -> None:
    """The check can fail: a missing image, a console error and a page that is too wide."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'><img src=none.png>"
        "<div style='width:2000px'>x</div><script>console.error('no')</script>"
    )
    program = find_chromium()
    assert program is not None
    with chromium(program) as browser:
        browser.attach()
        faults = " ".join(look(browser, page, "phone", None))
    assert "image" in faults
    assert "console error" in faults
    assert "sideways" in faults
