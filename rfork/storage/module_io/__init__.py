"""From storage into modules and back."""
