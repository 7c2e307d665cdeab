from dask.distributed import Client

from tracestore.tasks import commit_tasks, plan_tasks, write_task

if __name__ == "__main__":
    tasks = plan_tasks("traces_data/", "dask.zarr")
    with Client(n_workers=2, threads_per_worker=1) as client:  # or Client("ADDRESS")
        client.gather(client.map(write_task, tasks, pure=False))
    commit_tasks(tasks)
