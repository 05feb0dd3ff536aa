"""Shows the loading progress of transformers in rfork's progress bar instead of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rfork.cli.progress import Bar


@contextmanager
def show_loading(title: str) -> Iterator[None]:
    """Show on stderr how many tensors transformers has loaded, with a title such as ``load llama``."""
    with Bar(title, noun="tensors") as bar, patch_tqdm(lambda done, total: bar.update(done, total)):
        yield


@contextmanager
def patch_tqdm(show: Callable[[int, int], None]) -> Iterator[None]:
    """Make transformers report to `show` instead of drawing its own bars."""
    from transformers.utils import logging

    def create_adapter(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> TqdmAdapter:
        iterable, total = args[0] if args else kwargs.get("iterable"), kwargs.get("total")
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
    previous_hook = logging.set_tqdm_hook(create_adapter)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous_hook)


class TqdmAdapter:
    """Stands in for a tqdm bar of transformers: iterates over the items and reports how many are done."""

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
        """Do nothing: there is no bar to remove."""

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
