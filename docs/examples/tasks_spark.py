from pyspark.sql import SparkSession

from tracestore.tasks import commit_tasks, plan_tasks, write_task

context = SparkSession.builder.getOrCreate().sparkContext
tasks = plan_tasks("traces_data/", "spark.zarr")
context.parallelize(tasks, len(tasks) or 1).foreach(write_task)
commit_tasks(tasks)
