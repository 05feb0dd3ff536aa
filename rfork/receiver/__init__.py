"""The target side: one rank's fork from "layout without bytes" to "all chunks verified"."""
