import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.logging import disable_existing_loggers, get_dist_logger

NAME = "tests.colossalai"


@pytest.fixture
def _no_logger_is_left() -> Iterator[None]:
    get_dist_logger.cache_clear()
    yield
    get_dist_logger.cache_clear()
    for handler in list(logging.getLogger(NAME).handlers):
        logging.getLogger(NAME).removeHandler(handler)
        handler.close()


@pytest.mark.usefixtures("_no_logger_is_left")
def test_ranks_that_are_named_speak(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logger = get_dist_logger(NAME)
    assert get_dist_logger(NAME) is logger
    logger.log_to_file(tmp_path / "logs", suffix="run")
    logger.info("100% of one", ranks=[0])
    logger.warning("two")
    logger.error("of rank 1", ranks=[1])
    logger.debug("below INFO")
    logger.set_level("DEBUG")
    logger.debug("three")
    said = [
        f"colossalai - {NAME} - INFO: 100% of one",
        f"colossalai - {NAME} - WARNING: two",
        f"colossalai - {NAME} - DEBUG: three",
    ]
    assert capsys.readouterr().err.splitlines() == said
    assert (tmp_path / "logs/rank_0_run.log").read_text().splitlines() == said[:2]
    with pytest.raises(OptionError, match="level='LOUD' was given"):
        logger.set_level("LOUD")


def test_loggers_that_exist_are_quieted() -> None:
    names = [f"{NAME}.a", f"{NAME}.b"]
    before = {
        name: logging.getLogger(name).level
        for name, each in list(logging.Logger.manager.loggerDict.items())
        if isinstance(each, logging.Logger)
    }
    try:
        loggers = [logging.getLogger(name) for name in names]
        for each in loggers:
            each.setLevel(logging.DEBUG)
        disable_existing_loggers(include=names[:1])
        assert [each.level for each in loggers] == [logging.WARNING, logging.DEBUG]
        disable_existing_loggers(exclude=[])
        assert loggers[1].level == logging.WARNING
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
