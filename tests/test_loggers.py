"""A thread of a server that imports a module makes loggers while pytest goes over all there are."""

from __future__ import annotations

import logging
import uuid


def test_a_logger_made_meanwhile_ends_no_test() -> None:
    """As pytest's `catching_logs` does at the begin of each setup, call and teardown."""
    name = f"tests.{uuid.uuid4().hex}"
    try:
        for _ in logging.root.manager.loggerDict.values():
            logging.getLogger(name)
        assert logging.getLogger(name) in logging.root.manager.loggerDict.values()
    finally:
        logging.root.manager.loggerDict.pop(name)
