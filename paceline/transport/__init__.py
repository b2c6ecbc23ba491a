"""Messages between workers and server: sockets, connections, encryption, wire format."""
