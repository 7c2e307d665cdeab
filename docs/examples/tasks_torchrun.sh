tracestore convert traces_data/ ranks.zarr --plan ranks.json
torchrun --nproc-per-node 2 --max-restarts 3 --no-python tracestore work ranks.json
tracestore commit ranks.json --wait 600
