"""`asyncio.TaskGroup` and its exceptions, also for Python 3.10."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup as TaskGroup
    from builtins import BaseExceptionGroup as BaseExceptionGroup
    from builtins import ExceptionGroup as ExceptionGroup
else:
    from exceptiongroup import BaseExceptionGroup as BaseExceptionGroup
    from exceptiongroup import ExceptionGroup as ExceptionGroup
    from taskgroup import TaskGroup as TaskGroup
