"""Shows the loading progress of transformers in our progress bar instead of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rfork.cli.progress import Bar


class TqdmAdapter:
    """Replaces a tqdm bar of transformers: reports the count and iterates over the items."""

    def __init__(self, show: Callable[[int, int], None], items: Iterable[object], total: int | None) -> None:
        self._show = show
        self._items = items
        self.total = total or 0
        self.n = 0

    def update(self, count: float = 1) -> None:
        """Count further items."""
        self.n += int(count)
        self._show(self.n, self.total)

    def close(self) -> None:
        """Do nothing."""

    def set_postfix(self, *_: object, **__: object) -> None:
        """Do nothing: tensor names change too fast to be read."""

    set_description = set_postfix_str = set_description_str = refresh = set_postfix

    def __iter__(self) -> Iterator[object]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def show_loading(what: str) -> Iterator[None]:
    """Show on stderr how many tensors transformers has loaded, with a title such as ``load llama``."""
    with Bar(what, noun="tensors") as bar, patch_tqdm(lambda done, total: bar.update(done, total)):
        yield


@contextmanager
def patch_tqdm(show: Callable[[int, int], None]) -> Iterator[None]:
    """Make transformers report to `show` instead of drawing its own bars."""
    from transformers.utils import logging

    def make(_: object, items: tuple[object, ...], named: dict[str, object]) -> TqdmAdapter:
        iterable, total = items[0] if items else named.get("iterable"), named.get("total")
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        return TqdmAdapter(
            show,
            iterable if isinstance(iterable, Iterable) else (),
            total if isinstance(total, int) else None,
        )

    if not hasattr(logging, "set_tqdm_hook"):  # an older transformers draws its own bars
        yield
        return
    before = logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
