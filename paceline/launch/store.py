"""The store of ``torch.distributed``, hosted by the supervisor on the loopback interface only."""

from __future__ import annotations

import socket
import threading


class HostedStore:
    """A store that workers can connect to at once, and that answers when torch is imported.

    Importing torch takes seconds, so a thread does it while the workers start. Meanwhile the socket already listens,
    and the kernel queues their connections. The interpreter's exit waits for the import to finish.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.error: Exception | None = None  # why it cannot serve
        self._store: object = None  # a TCPStore, which answers while it is referenced
        self._closed = False
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Start answering, in the background."""
        threading.Thread(target=self._serve, name="paceline-store").start()

    def close(self) -> None:
        """Stop listening and answering, at once."""
        with self._lock:
            self._closed = True
            self._store = None
            self._listener.close()

    def _serve(self) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            with self._lock:
                if not self._closed:
                    self._store = TCPStore(
                        "127.0.0.1",
                        self.port,
                        is_master=True,
                        wait_for_workers=False,
                        master_listen_fd=self._listener.detach(),
                    )
        except Exception as error:
            self.error = error
