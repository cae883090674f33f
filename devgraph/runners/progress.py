"""The progress bar of a capture; nothing where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, total: int, wanted: bool | None) -> Iterator[Callable[[str], None]]:
    """Show a bar while the block runs; yields a function that advances it by one.

    Args:
        title: what is being done.
        total: number of steps.
        wanted: True shows it and leaves it standing, False does not; None shows it meanwhile when
            standard error is a terminal and rich is installed.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        if wanted:
            raise
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True), transient=wanted is None) as bar:
        task = bar.add_task(title, total=total)
        yield lambda label: bar.update(task, advance=1, description=f"{title} {label}")
