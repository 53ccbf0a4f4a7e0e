import json
import re

from tensorstow.report.page import LOG_VIEW, LogRow, document, log_of
from tensorstow.report.spans import TimeSpan


def test_a_page_escapes_its_title_and_has_no_script_without_a_log() -> None:
    page = document("a <run>", "<p>body</p>")
    assert "<title>a &lt;run&gt;</title>" in page
    assert "<script" not in page


def test_a_log_cannot_end_its_script() -> None:
    row = LogRow("</script>", [("read", [TimeSpan("read", "read", 0.0, 1.0, nbytes=5)])])
    page = document("run", LOG_VIEW, log_of([row], (0.0, 1.0), []))
    found = re.search(r'<script id="log" type="application/json">(.*?)</script>', page)
    assert found
    assert json.loads(found[1])["rows"][0]["title"] == "</script>"


def test_a_log_has_the_lanes_and_colours_that_are_used() -> None:
    spans = [TimeSpan("read /nvme", "read", 0.1234567, 1.0, chunk=1)]
    log = log_of([LogRow("run", [("compute", []), ("read /nvme", spans)])], (0.0, 1.0), [])
    assert [lane["name"] for lane in log["rows"][0]["lanes"]] == ["read /nvme"]
    assert list(log["colors"]) == ["read"]
    assert log["rows"][0]["lanes"][0]["spans"][0]["start"] == 0.123457
