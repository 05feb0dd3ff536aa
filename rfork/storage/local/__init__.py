"""Files of this machine: through the page cache or past it, whichever is faster."""
