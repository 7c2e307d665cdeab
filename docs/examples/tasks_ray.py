import ray

from tracestore.tasks import commit_tasks, plan_tasks, write_task

tasks = plan_tasks("traces_data/", "ray.zarr")
write = ray.remote(write_task)
ray.get([write.remote(task) for task in tasks])
commit_tasks(tasks)
