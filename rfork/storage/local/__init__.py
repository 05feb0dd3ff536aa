"""Local files, read through the page cache or past it, whichever is faster."""
