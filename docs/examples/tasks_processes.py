from concurrent.futures import ProcessPoolExecutor

from tracestore.tasks import commit_tasks, plan_tasks, write_task

if __name__ == "__main__":
    tasks = plan_tasks("traces_data/", "processes.zarr")
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(write_task, tasks))
    commit_tasks(tasks)
