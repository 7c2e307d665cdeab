tracestore convert traces_data/ slurm.zarr --plan slurm.json
job=$(sbatch --parsable --array=0-7 --wrap 'tracestore work slurm.json --shard $SLURM_ARRAY_TASK_ID/8')
sbatch --dependency=afterany:$job --wrap 'tracestore commit slurm.json --wait 600'
