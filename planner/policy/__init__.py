"""The planning policy: pure functions that decide which target reads which chunks from which source."""
