"""Transports embeddings and keys and values, behind `epd.transfer.connectors.Connector`."""

from stages.connectors.in_process import InProcessHub
from stages.connectors.mailbox import MailboxConnector

__all__ = ["InProcessHub", "MailboxConnector"]
