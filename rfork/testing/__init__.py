"""In-memory implementations of rfork's interfaces, for tests of code that uses them."""
