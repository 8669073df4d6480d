"""Transports for embeddings and for keys and values, behind `epd.transfer.connectors.Connector`."""

from stages.connectors.in_process import InProcessHub
from stages.connectors.mailbox import MailboxConnector
from stages.connectors.shared_memory import SharedMemoryConnector, SharedPoolFile

__all__ = ["InProcessHub", "MailboxConnector", "SharedMemoryConnector", "SharedPoolFile"]
