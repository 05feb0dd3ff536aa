"""The receiving side: one rank's run from "I have a layout and no bytes" to "every chunk verified"."""
