"""Fill one store with many processes or machines, in a shared folder or on an object store.

    tasks = plan_tasks(sources, store)        # once
    for task in tasks: write_task(task)       # anywhere, in any order, more than once
    report = commit_tasks(tasks)              # once all tasks are written

docs/tasks.md has recipes for engines that map `write_task`.
"""

from tracestore.tasks.committing import commit_tasks
from tracestore.tasks.receipt import Receipt
from tracestore.tasks.task_plan import Task, plan_tasks
from tracestore.tasks.task_writing import write_task

__all__ = ["Receipt", "Task", "commit_tasks", "plan_tasks", "write_task"]
