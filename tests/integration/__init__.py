"""Real sockets, a real server process, the bundled model, the official client."""
