"""What the reference pages are made of, read from the code itself whenever the site is built (`pages`)."""
